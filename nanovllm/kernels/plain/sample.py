"""Sample tokens: the winner of a race, for greedy and temperature rows together.

`no_token` says which rows give NO_TOKEN.
"""

import torch

from nanovllm.kernels.plain.noise import GOLDEN, log_exponential

# Logits that race at a time: few enough that each pass finds the previous one's results cached.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
BLOCK = 64


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V]: a draw from the softmax of each row.

    Temperatures [B] in float32, 0 for greedy; keys [B] in int64, from `noise`. If either is None,
    every row is greedy. `noise` explains why the first token to arrive is a draw. Rounding can
    change the draw only if the first two tokens arrive within it. Syncs. Peak memory: 12 bytes for
    each of CHUNK_ELEMENTS logits.
    """
    if temperatures is None or keys is None:
        return _checked(logits, first_max(logits))
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    step = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab_size)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device).mul_(GOLDEN)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        times = log_exponential(keys[rows], ids)
        scores = times.mul_(-temperatures[rows, None]).add_(logits[rows])
        tokens[rows] = _checked(scores, first_max(scores))
    return tokens


def _checked(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The best tokens [B] by scores [B, V], or NO_TOKEN."""
    top = scores.gather(1, tokens[:, None])[:, 0]
    if abs(float(top.sum())) < torch.inf:  # the usual case
        return tokens
    from nanovllm.kernels.plain.no_token import or_no_token

    return or_no_token(tokens, scores, top)


def first_max(x: torch.Tensor) -> torch.Tensor:
    """Index of the first largest entry of each row of x [B, V]: argmax, several times faster.

    The maxima of blocks are found with vector instructions; argmax cannot use these.
    """
    num_rows, size = x.shape
    if size % BLOCK:
        return x.max(dim=-1).indices
    blocks = x.view(num_rows, -1, BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(num_rows, device=x.device)
    return block * BLOCK + blocks[rows, block].argmax(dim=-1)
