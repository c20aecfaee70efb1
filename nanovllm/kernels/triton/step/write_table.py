"""Write a step's changes to the device table.

The kernel reads the changes from the host's memory, so that no copy is needed before it: if a step
waits for the tokens of the last step, each launch and each copy makes it wait longer.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv

BLOCK = 256


@triton.jit(do_not_specialize=["size"])
def _write_table_kernel(words_ptr, offsets_ptr, values_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program writes some of the words."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(offsets_ptr + index, mask=index < size, other=0)
    value = tl.load(values_ptr + index, mask=index < size, other=0)
    tl.store(words_ptr + offset, value, mask=index < size)


def write_table(words: torch.Tensor, changes: torch.Tensor, size: int) -> None:
    """Write values to words: the first `size` columns of `changes` [2, any] are offset and value.

    All are int32. The changes are on the device, or in pinned memory of the host that must not
    change until the kernel has run.
    """
    grid = (cdiv(size, BLOCK),)
    _write_table_kernel[grid](words, changes[0], changes[1], size, BLOCK=BLOCK)
