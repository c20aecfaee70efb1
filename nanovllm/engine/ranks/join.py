"""Become a rank: through NCCL between GPUs, through shared memory on the CPU."""

from nanovllm.engine.device import resolve_device
from nanovllm.engine.ranks.process_ranks import ProcessRanks
from nanovllm.layers.ranks import Ranks


def join(rank: int, size: int, device: str, place: int | None = None) -> ProcessRanks:
    """Become a rank on `device`, as `Config` names it. Rank 0 makes the place, others are told."""
    own_device = resolve_device(device, Ranks(rank, size))
    if own_device.type == "cuda":
        from nanovllm.engine.ranks.nccl_ranks import NcclRanks

        return NcclRanks(rank, size, own_device, place)
    from nanovllm.engine.ranks.shared_ranks import SharedRanks

    return SharedRanks(rank, size, place)
