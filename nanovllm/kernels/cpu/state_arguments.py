"""What the kernels of layers with states have in common: the arguments for slots and sequences."""

from typing import Any

import torch

from nanovllm.kernels.operands.state_step import StateStep


def state_arguments(states: torch.Tensor, step: StateStep, num_rows: int) -> tuple[Any, ...]:
    """The addresses of states and slots, and the numbers that `StateRows` of state_rows.h has.

    They are valid as long as `step` is.
    """
    before, after = step.before, step.after
    assert before.dtype == after.dtype == torch.int64 and len(after) == num_rows
    assert before.is_contiguous() and after.is_contiguous() and states[0].is_contiguous()
    ends = step.ends
    if ends is None:
        assert len(before) * step.num_queries == num_rows
    else:
        step.ends = ends = torch.as_tensor(ends, dtype=torch.int64)  # for the next layers too
        assert len(ends) == len(before) + 1 and int(ends[-1]) == num_rows
    return (
        states.data_ptr(), states.stride(0), before.data_ptr(), after.data_ptr(),
        None if ends is None else ends.data_ptr(), len(before), step.num_queries,
    )  # fmt: skip
