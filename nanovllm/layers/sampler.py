"""Sampler: from logits to token ids."""

import torch
from torch import nn

# Rows are drawn a few at a time, so that what a pass leaves behind is still in the cache.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
BLOCK = 64
GOLDEN = 0x9E3779B9 - (1 << 32)  # as an int32: spreads the token ids, one-to-one


class Sampler(nn.Module):
    """Greedy and temperature rows in one batch.

    Gumbel-max: tokens race with arrival times that are exponential at the rates exp(logits /
    temperature), and a race is won in proportion to the rates, so the first to arrive is a draw
    from the softmax. A row's times are a hash of its key and the token id, and the key is one of
    seed and position: what a request draws does not depend on its neighbours, and rounding can
    change it only where the first two arrive within that rounding.
    """

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V]; `temperatures` None says that every row is greedy.

        Temperatures [B] in float32, 0 for greedy; keys [B] in int64, all bits well mixed.
        """
        if temperatures is None or keys is None:
            return first_max(logits)
        return draw(logits, temperatures, keys)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row. Peak memory: CHUNK_ELEMENTS values of 4 bytes, three times."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    step = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab_size)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device).mul_(GOLDEN)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        times = log_exponential(keys[rows], ids)
        scores = times.mul_(-temperatures[rows, None]).add_(logits[rows])
        tokens[rows] = first_max(scores)
    return tokens


def log_exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of standard exponential numbers [B, V]: a hash of each key and spread token id.

    Two rounds of multiply and xor-shift over 32 bits, the halves of the key going in before each.
    All finite; the small times, which win, keep their full precision.
    """
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    x = (ids ^ low).mul_(0x21F0AAAD)
    x.bitwise_xor_(x >> 15).add_(high).mul_(0x735A2D97)
    x.bitwise_xor_(x >> 15)
    # u in (0, 1), its sign turned; log1p(-u) is the negative of an exponential number.
    minus_u = x.float().abs_().mul_(-(2.0**-31) * (1 - 2.0**-23)).sub_(2.0**-32)
    return minus_u.log1p_().neg_().log_()


def first_max(x: torch.Tensor) -> torch.Tensor:
    """Index of the first largest entry of each row of x [B, V]: argmax, several times faster.

    The maxima of blocks are found with vector instructions, which an index does not allow.
    """
    num_rows, size = x.shape
    if size % BLOCK:
        return x.max(dim=-1).indices
    blocks = x.view(num_rows, -1, BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(num_rows, device=x.device)
    return block * BLOCK + blocks[rows, block].argmax(dim=-1)
