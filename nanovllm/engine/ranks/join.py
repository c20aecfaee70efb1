"""Joins the ranks: through NCCL between GPUs, through shared memory on the CPU."""

from nanovllm.engine.ranks.process_ranks import Check, ProcessRanks, no_check
from nanovllm.engine.start.placement import resolve_device
from nanovllm.layers.ranks import Ranks


def join(
    rank: int, size: int, device: str, address: int | None = None, check: Check = no_check,
    one_order: bool = False,
) -> ProcessRanks:  # fmt: skip
    """Join as a rank on `device`, the option of `Config`. On a CPU all sums have one order.

    Rank 0 creates the address; the other ranks get it as an argument.
    """
    own_device = resolve_device(device, Ranks(rank, size))
    if own_device.type == "cuda":
        from nanovllm.engine.ranks.nccl_ranks import NcclRanks

        return NcclRanks(rank, size, own_device, address, check, one_order)
    from nanovllm.engine.ranks.shared_ranks import SharedRanks

    return SharedRanks(rank, size, address, check)
