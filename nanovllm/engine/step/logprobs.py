"""What was likely: log-probabilities of the logits as the model has them, in float32.

They are told to the sequences that ask, of the tokens that these generate and of those of their
prompts. What is computed goes to the host at once, and is read with a step's tokens: by `Telling`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.engine.sequence import LikelyToken, Sequence
from nanovllm.engine.step.transfer import download, upload
from nanovllm.kernels.plain.ranking import most_likely

TOLD_LOGITS = 1 << 23  # at most, at a time: some 50 bytes for each are taken

Columns = tuple[torch.Tensor, ...]  # ids, log-probabilities and ranks: [B, 1 + K] each
Taker = Callable[[list[LikelyToken]], None]


@dataclass(slots=True)
class Telling:
    """What will be told: `columns` on their way to the host, and who takes what is in a row.

    A row's own token stands first, then the most likely ones; `numbers` says how many are wanted.
    """

    columns: Columns
    numbers: list[int]
    takers: list[Taker]

    def tell(self) -> None:
        """Hand out the columns, which have come to the host."""
        rows = zip(self.takers, self.numbers, *(c.tolist() for c in self.columns), strict=True)
        for take, number, ids, values, ranks in rows:
            own, *others = zip(ids, values, ranks, strict=True)
            take([own, *(token for token in others[:number] if token[0] != own[0])])


def rows_at_a_time(vocab_size: int) -> int:
    """How many rows are told of together."""
    return max(1, TOLD_LOGITS // vocab_size)


def warm_up_logprobs(logits: torch.Tensor) -> None:
    """Take the most memory of the device that telling of logits [B, V] takes: all, in order."""
    _likely(logits, logits.new_zeros(len(logits), dtype=torch.long), logits.shape[1])


def tell_logprobs(
    seqs: list[Sequence], logits: torch.Tensor, token_ids: torch.Tensor
) -> Iterator[Telling]:
    """Tell sequences of their next tokens, `token_ids` [B] from logits [B, V]."""
    wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
    size = rows_at_a_time(logits.shape[1])
    for start in range(0, len(wanted), size):
        some = [seqs[row] for row in wanted[start : start + size]]
        rows = upload(np.array(wanted[start : start + size]), logits.device)
        numbers = [seq.params.logprobs or 0 for seq in some]
        takers: list[Taker] = [partial(seq.logprobs.__setitem__, seq.num_tokens) for seq in some]
        columns = _likely(logits[rows], token_ids[rows], max(numbers))
        yield Telling(tuple(map(download, columns)), numbers, takers)


def untold_prompt_tokens(seqs: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
    """The prompt tokens that a step tells of, in the order of its `prompt_rows`."""
    return ((seq, row + 1) for seq in seqs for row in seq.untold_rows)


def tell_prompt_logprobs(untold: Iterator[tuple[Sequence, int]], logits: torch.Tensor) -> Telling:
    """Tell sequences of the next `untold` tokens, which come from logits [B, V]."""
    tokens = list(islice(untold, len(logits)))
    ids = upload(np.array([seq.token_ids[place] for seq, place in tokens]), logits.device)
    numbers = [seq.params.prompt_logprobs or 0 for seq, _ in tokens]
    takers = [seq.prompt_logprobs.append for seq, _ in tokens if seq.prompt_logprobs is not None]
    columns = _likely(logits, ids, max(numbers))
    return Telling(tuple(map(download, columns)), numbers, takers)


def _likely(logits: torch.Tensor, chosen: torch.Tensor, number: int) -> Columns:
    """The tokens `chosen` [B], and behind each the `number` most likely ones."""
    logprobs = logits.float().log_softmax(dim=1)
    values, ids = most_likely(logprobs, number)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(dim=1, keepdim=True)
    if number:  # of equal tokens all have the rank of the first, the place where their value begins
        begins = F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)
        places = torch.arange(number, device=ids.device).expand_as(ids)
        first = (places * begins).cummax(dim=1).values
        ranks = torch.cat([ranks, first], dim=1)
    ids, values = torch.cat([chosen[:, None], ids], dim=1), torch.cat([own, values], dim=1)
    return ids, values, ranks + 1
