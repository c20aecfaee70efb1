"""Which tokens a program computes one after the other, for steps of all kinds alike."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.operands.state_step import StateStep

# Arguments of kernels whose alignment depends on a step. They are compiled for any.
OF_A_STEP = ("before_ptr", "after_ptr", "parts_ptr")


@triton.jit
def tokens_of(parts_ptr, place, queries):  # type: ignore[no-untyped-def]
    """As `gates.tokens_of`, with a number of queries that is no constant: 0 of a prefill."""
    part_ptr, is_part = parts_ptr + place * 8, queries == 0
    sequence = tl.where(is_part, tl.load(part_ptr, mask=is_part, other=0), place)
    start = tl.load(part_ptr + 1, mask=is_part, other=0).to(tl.int64)
    first = tl.where(is_part, start, place.to(tl.int64) * queries)
    count = tl.where(is_part, tl.load(part_ptr + 2, mask=is_part, other=0), queries)
    return sequence, first, count


def parts_of(step: StateStep) -> tuple[torch.Tensor, int, int]:
    """The table of parts, the number of sequences, and that of their queries; 0 of a prefill.

    A decode step has no table: kernels get another one of the same type, and read nothing.
    """
    if step.ends is None:
        return step.before.view(torch.int32), len(step.before), step.num_queries
    return step.chunks.parts, len(step.chunks.parts), 0
