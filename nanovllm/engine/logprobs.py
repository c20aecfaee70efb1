"""What was likely: log-probabilities of the logits as the model has them, in float32.

They are told to the sequences that ask, of the tokens that these generate and of those of their
prompts. What is computed stays on the device until a step's tokens are read: then comes `Telling`.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch

from nanovllm.engine.sampling_inputs import rows_at_a_time
from nanovllm.engine.sequence import LikelyToken, Sequence
from nanovllm.layers.ranking import most_likely

Telling = Callable[[], None]
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, log-probabilities, ranks: [B, 1+K]


def tell_logprobs(
    seqs: list[Sequence], logits: torch.Tensor, token_ids: torch.Tensor
) -> Iterator[Telling]:
    """Tell sequences of their next tokens, `token_ids` [B] from logits [B, V]."""
    wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
    size = rows_at_a_time(logits.shape[1])
    for start in range(0, len(wanted), size):
        rows = wanted[start : start + size]
        numbers = [seqs[row].params.logprobs or 0 for row in rows]
        columns = _likely(logits[rows], token_ids[rows], max(numbers))
        tokens = [(seqs[row], seqs[row].num_tokens) for row in rows]

        def tell(
            tokens: list[tuple[Sequence, int]] = tokens,
            numbers: list[int] = numbers,
            columns: Columns = columns,
        ) -> None:
            for (seq, place), likely in zip(tokens, _read(columns, numbers), strict=True):
                seq.logprobs[place] = likely

        yield tell


def untold_prompt_tokens(seqs: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
    """The prompt tokens that a step tells of, in the order of its `prompt_rows`."""
    return ((seq, row + 1) for seq in seqs for row in seq.untold_rows)


def tell_prompt_logprobs(untold: Iterator[tuple[Sequence, int]], logits: torch.Tensor) -> Telling:
    """Tell sequences of the next `untold` tokens, which come from logits [B, V]."""
    tokens = list(islice(untold, len(logits)))
    ids = torch.tensor([seq.token_ids[place] for seq, place in tokens], device=logits.device)
    numbers = [seq.params.prompt_logprobs or 0 for seq, _ in tokens]
    columns = _likely(logits, ids, max(numbers))

    def tell() -> None:
        for (seq, _), likely in zip(tokens, _read(columns, numbers), strict=True):
            assert seq.prompt_logprobs is not None
            seq.prompt_logprobs.append(likely)

    return tell


def _likely(logits: torch.Tensor, chosen: torch.Tensor, number: int) -> Columns:
    """The tokens `chosen` [B], and behind each the `number` most likely ones."""
    logprobs = logits.float().log_softmax(dim=1)
    values, ids = most_likely(logprobs, number)
    own = logprobs.gather(1, chosen[:, None])
    own_ranks = (logprobs > own).sum(dim=1, keepdim=True)
    # Of equal tokens all have the rank of the first.
    ranks = (values[:, :, None] < values[:, None, :]).sum(dim=2)
    ids, values = torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, values], dim=1)
    return ids, values, torch.cat([own_ranks, ranks], dim=1) + 1


def _read(columns: Columns, numbers: list[int]) -> Iterator[list[LikelyToken]]:
    """For each row its own token, and as many of the likeliest as it asks for less that one."""
    rows = zip(numbers, *(column.tolist() for column in columns), strict=True)
    for number, ids, values, ranks in rows:
        own, *others = zip(ids, values, ranks, strict=True)
        yield [own, *(token for token in others[:number] if token[0] != own[0])]
