"""MxStack: experts' weights in MXFP4, in the layout that the Triton kernels read.

E experts of this rank, K inputs, N outputs, R runs of RUN inputs. The numbers are those of the
file, so nothing is rounded; only the order of their bits differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.block_matrix import BlockMatrix

RUN = 128  # inputs that a kernel takes at a time
MOST_SHARED = 1 << 14  # tiles of outputs that several programs share
GROUPS = 4  # groups of a run: values with one scale
MOST_NARROW = 128  # the largest byte of a scale with which one multiplication decodes a value


@dataclass(frozen=True, slots=True)
class MxStack:
    """Weights [E, N, K]; K is padded to whole runs, with codes of zero.

    The input `32 * g + 8 * c + 2 * q + h` of a run belongs to the group g, and to the thread q of
    four in a tensor core, which has a word of codes for each group. The lower half of a word has
    the codes with h = 0, and the upper half those with h = 1. In a half, the sign and the other
    three bits of the code c are, from the highest on, the bits

        9 2 1 0 for c = 0, 13 6 5 4 for c = 1, 3 12 11 10 for c = 2, and 15 8 7 14 for c = 3

    except that the halves have each other's sign for c = 2. So one shift moves the bits of c = 0 or
    c = 1, and one rotation those of c = 2, to where bfloat16 has its sign, the end of its exponent
    and the start of its mantissa; of c = 3, only one bit is elsewhere. Such a number is the value
    times 2^-126, also if it is less than one. A scale is a byte e that stands for 2^(e - 127). If
    the stack `is_wide`, scales are these bytes; else they are exponents of 2^(e - 1) in bfloat16,
    which has no larger ones.
    """

    codes: torch.Tensor  # int32 [E, R, N, 4 * GROUPS]: the words of q together
    scales: torch.Tensor  # int32 [E, R, N]: a byte for each group, from the lowest on
    shape: tuple[int, int, int]  # E, N and K
    is_wide: bool
    arrivals: torch.Tensor  # int32 zeros, for kernels that divide K among programs

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def arrange_mx_experts(matrices: Sequence[BlockMatrix]) -> MxStack:
    """Copy matrices of one shape. Peak memory: their copy, and 16 bytes for each value of one."""
    (size_out, size_in), device = matrices[0].shape, matrices[0].codes.device
    runs = cdiv(size_in, RUN)
    assert runs * size_out * 4 * GROUPS < 1 << 31, "kernels compute offsets in 32 bits"
    codes = torch.empty(len(matrices), runs, size_out, 4 * GROUPS, dtype=torch.int32, device=device)
    scales = torch.empty(len(matrices), runs, size_out, dtype=torch.int32, device=device)
    is_wide = any(bool((each.codes[..., 0] > MOST_NARROW).any()) for each in matrices)
    for i, each in enumerate(matrices):
        assert each.kind.name == "MXFP4" and each.shape == (size_out, size_in)
        blocks = F.pad(each.codes, (0, 0, 0, runs * GROUPS - each.codes.shape[1]))
        codes[i] = _words(blocks[..., 1:])
        exponents = blocks[..., 0] if is_wide else blocks[..., 0] + (MOST_NARROW - 2)
        scales[i] = exponents.contiguous().view(torch.int32).t()
    arrivals = torch.zeros(MOST_SHARED, dtype=torch.int32, device=device)
    return MxStack(codes, scales, (len(matrices), size_out, size_in), is_wide, arrivals)


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """The words [R, N, 16] of blocks [N, R * GROUPS, 16] that have value i next to value i + 16."""
    values = torch.cat([pairs & 15, pairs >> 4], dim=-1).int()
    c0, c1, c2, c3 = values.view(len(values), -1, GROUPS, 4, 4, 2).unbind(3)  # n, r, g, q, h
    halves = _near(c0) | _near(c1) << 4 | (c2 & 7) << 10 | c2.flip(-1) & 8
    halves |= (c3 & 6) << 6 | (c3 & 1) << 14 | (c3 & 8) << 12
    words = halves[..., 0] | halves[..., 1] << 16
    return words.permute(1, 0, 3, 2).flatten(2)


def _near(codes: torch.Tensor) -> torch.Tensor:
    """Three bits, and the sign as far from them as in bfloat16."""
    return codes & 7 | (codes & 8) << 6
