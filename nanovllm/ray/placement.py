"""The resources of a replica: cores, or a GPU for each of its ranks."""

from collections.abc import Mapping
from typing import Any

import ray

from nanovllm.config import Config
from nanovllm.utils.checks import check_float

DEVICES = ("auto", "cpu", "cuda")  # Ray chooses which GPUs a replica sees


def is_on_cuda(config: Config, cluster: Mapping[str, float] | None = None) -> bool:
    """Whether replicas compute on GPUs.

    `cluster` has the resources of all machines. By default these are read from Ray's cluster, but
    only if the device is "auto"; Ray is started if there is no cluster.
    """
    if config.device not in DEVICES:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with Ray, got {config.device!r}")
    if config.device != "auto":
        return bool(config.device == "cuda")
    if cluster is None:
        if not ray.is_initialized():
            ray.init()
        cluster = ray.cluster_resources()
    return cluster.get("GPU", 0) > 0


def check_gpus(config: Config, on_cuda: bool, num_gpus: Any) -> None:
    """Raise unless a replica has a GPU for each rank; one rank may have a part of a GPU."""
    ranks = config.tensor_parallel_size
    check_float("num_gpus", num_gpus, 0.0, above=on_cuda)
    if not on_cuda and num_gpus:
        raise ValueError(f"num_gpus must be 0 for an engine on CPUs, got {num_gpus}")
    if on_cuda and num_gpus != ranks and (ranks > 1 or num_gpus > 1):
        raise ValueError(f"num_gpus must be tensor_parallel_size, {ranks}, got {num_gpus}")
