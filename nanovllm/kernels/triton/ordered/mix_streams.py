"""Sums of streams of hidden states, with one order for any number of rows.

PyTorch chooses the kernel of such products by the number of rows. Here a program computes a part of
a row's outputs in the same steps.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv

BLOCK = 1024


@triton.jit
def _mix_streams_kernel(  # type: ignore[no-untyped-def]
    coefs_ptr, x_ptr, out_ptr, num_streams, num_rows, size, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK numbers of a row in all streams. Each is a sum over the streams, in their order."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    for stream in range(num_streams):
        total = tl.zeros([BLOCK], tl.float32)
        for other in range(num_streams):
            coef = tl.load(coefs_ptr + (row * num_streams + stream) * num_streams + other)
            x = tl.load(x_ptr + (other * num_rows + row) * size + n, mask=inside, other=0.0)
            total += coef.to(tl.float32) * x.to(tl.float32)
        out_at = out_ptr + (stream * num_rows + row) * size + n
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


def mix_streams(coefs: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """For each row, its matrix of coefs [T, S, S] times its numbers in streams [S, T, hidden].

    Sums are float32. Writes as many bytes as the streams have; the cache has what is read again.
    """
    coefs, streams = coefs.contiguous(), streams.contiguous()
    out, (num_streams, num_rows, size) = torch.empty_like(streams), streams.shape
    if num_rows:
        _mix_streams_kernel[(num_rows, cdiv(size, BLOCK))](
            coefs, streams, out, num_streams, num_rows, size, BLOCK=BLOCK, num_warps=4
        )
    return out
