"""What was likely: log-probabilities of the logits as the model has them, in float32.

Told to the sequences that ask, of the tokens that they generate and of those of their prompts.
"""

from collections.abc import Iterator
from itertools import islice

import torch

from nanovllm.engine.sampling_inputs import rows_at_a_time
from nanovllm.engine.sequence import LikelyToken, Sequence
from nanovllm.layers.ranking import most_likely


def note_logprobs(seqs: list[Sequence], logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Tell sequences of their next tokens, `token_ids` [B] from logits [B, V]."""
    wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
    size = rows_at_a_time(logits.shape[1])
    for start in range(0, len(wanted), size):
        rows = wanted[start : start + size]
        numbers = [seqs[row].params.logprobs or 0 for row in rows]
        likely = _likely(logits[rows], token_ids[rows], numbers)
        for row, tokens in zip(rows, likely, strict=True):
            seqs[row].logprobs[seqs[row].num_tokens] = tokens


def untold_prompt_tokens(seqs: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
    """The prompt tokens that a step tells of, in the order of its `prompt_rows`."""
    return ((seq, row + 1) for seq in seqs for row in seq.untold_rows)


def note_prompt_logprobs(untold: Iterator[tuple[Sequence, int]], logits: torch.Tensor) -> None:
    """Tell sequences of the next `untold` tokens, which come from logits [B, V]."""
    tokens = list(islice(untold, len(logits)))
    ids = torch.tensor([seq.token_ids[place] for seq, place in tokens], device=logits.device)
    numbers = [seq.params.prompt_logprobs or 0 for seq, _ in tokens]
    for (seq, _), likely in zip(tokens, _likely(logits, ids, numbers), strict=True):
        assert seq.prompt_logprobs is not None
        seq.prompt_logprobs.append(likely)


def _likely(
    logits: torch.Tensor, chosen: torch.Tensor, numbers: list[int]
) -> list[list[LikelyToken]]:
    """For each row its `chosen` token, and the `numbers` most likely ones less that one."""
    logprobs = logits.float().log_softmax(dim=1)
    values, ids = most_likely(logprobs, max(numbers))
    own = logprobs.gather(1, chosen[:, None])
    own_ranks = (logprobs > own).sum(dim=1, keepdim=True)
    # Of equal tokens all have the rank of the first.
    ranks = (values[:, :, None] < values[:, None, :]).sum(dim=2)
    columns = [(chosen[:, None], ids), (own, values), (own_ranks, ranks)]
    rows = zip(*(torch.cat(pair, dim=1).tolist() for pair in columns), strict=True)
    likely = []
    for number, (row_ids, row_values, row_ranks) in zip(numbers, rows, strict=True):
        own_token, *rest = zip(row_ids, row_values, (r + 1 for r in row_ranks), strict=True)
        likely.append([own_token, *(token for token in rest[:number] if token[0] != own_token[0])])
    return likely
