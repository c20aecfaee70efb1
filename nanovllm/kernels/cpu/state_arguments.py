"""What the kernels of layers with states have in common: the arguments for slots and sequences."""

from typing import Any

import numpy as np
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
        ends = np.asarray(ends)
        if ends.dtype != np.int64:
            step.ends = ends = ends.astype(np.int64)  # for the next layers too
        assert ends.flags.c_contiguous and len(ends) == len(before) + 1 and ends[-1] == num_rows
    return (
        states.data_ptr(), states.stride(0), before.data_ptr(), after.data_ptr(),
        None if ends is None else ends.ctypes.data, len(before), step.num_queries,
    )  # fmt: skip
