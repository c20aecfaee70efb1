"""Find the most likely tokens in order, of equal ones the lower id first. R rows, V tokens."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.cuts import BLOCK, are_few


def most_likely(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `number` of x [R, V] by value and then by id: values and ids [R, K].

    For a small number, only the `number` blocks with the largest maxima are searched (of equal ones
    the lower block first): their maxima come before all tokens of the other blocks. Peak memory:
    about 40 bytes for each logit, if the number is large.
    """
    num_rows, size = x.shape
    number = min(number, size)
    ids = torch.arange(size, device=x.device).expand_as(x)
    if are_few(number, size):
        blocks = F.pad(x, (0, -size % BLOCK), value=-torch.inf) if size % BLOCK else x
        blocks = blocks.view(num_rows, -1, BLOCK)
        maxima = blocks.amax(dim=2)
        first = _sortable(maxima, ids[:, : maxima.shape[1]]).topk(number, sorted=False).indices
        ids = (first[:, :, None] * BLOCK + ids[0, :BLOCK]).flatten(1)
        x = blocks[torch.arange(num_rows, device=x.device)[:, None], first].flatten(1)
    places = _sortable(x, ids).topk(number).indices
    return x.gather(1, places), ids.gather(1, places)


def _sortable(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Distinct integers in the order of values, and of descending ids among equal values.

    As integers, the bits of floats have the order of the floats, if those of negative floats are
    inverted except for the sign.
    """
    bits = (x.float() + 0.0).view(torch.int32)  # never a negative zero
    bits = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    return bits.long().mul_(1 << 32).sub_(ids)
