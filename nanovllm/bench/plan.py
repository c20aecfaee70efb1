"""Everything that a benchmark needs: a model or a shape, the engine's options, the requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.shapes import SHAPES, write_shape
from nanovllm.bench.workload import MAX_MODEL_LEN, Lengths, Workload, draw_workload
from nanovllm.config import Config
from nanovllm.engine.device import resolve_device
from nanovllm.layers.ranks import Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import resolve_model


@dataclass(frozen=True)
class Plan:
    """A benchmark that is ready to run. The model directory of a shape only has a config."""

    shape: str | None
    name: str  # of the shape or the model, in the result
    config: Config
    model: ModelConfig
    device: torch.device
    lengths: Lengths
    workload: Workload


def make_plan(
    options: Mapping[str, Any], shape: str | None, lengths: Lengths, scratch: Path
) -> Plan:
    """Check everything, and draw the requests.

    `options` are the engine's. A shape replaces their model, and its files are in `scratch`. The
    default of `max_model_len` is 4096, or the model's if that is less. With a shape, the draft
    model or the head may be the name of one, too.
    """
    if shape is not None:
        options = {"load_format": "dummy", **options, "model": write_shape(shape, scratch)}
        options |= _draft_shape(options, scratch / "draft")
    asked = Config(**options)
    path = resolve_model(asked.model, revision=asked.revision, download_dir=asked.download_dir)
    model = ModelConfig.from_dir(path, asked.quantization)
    longest = min(MAX_MODEL_LEN, model.max_position_embeddings)
    local = {"model": str(path), "revision": None}
    config = Config(**{"max_model_len": longest, **options, **local})
    lengths.check_fit(config.max_model_len or model.max_position_embeddings)
    model.check_parallel_size(config.tensor_parallel_size, config.enable_expert_parallel)
    device = resolve_device(config.device, Ranks(0, config.tensor_parallel_size))
    workload = draw_workload(lengths, model.vocab_size)
    return Plan(shape, shape or options["model"], config, model, device, lengths, workload)


def _draft_shape(options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The option `speculative_config` with a directory where it names a shape."""
    asked = options.get("speculative_config")
    if not isinstance(asked, Mapping) or asked.get("model") not in SHAPES:
        return {}
    path.mkdir()
    model = write_shape(asked["model"], path, is_head=asked.get("method") == "eagle3")
    return {"speculative_config": {**asked, "model": model}}
