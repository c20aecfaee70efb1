"""Logprobs: the log-probabilities of a sequence's tokens, kept as they arrive from the device."""

import itertools
from collections.abc import Iterator
from typing import Any

from nanovllm.engine.requests.report_limit import ReportLimit
from nanovllm.engine.requests.token_texts import token_text, token_texts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.outputs import TokenLogprob
from nanovllm.utils.slices import Steps

LikelyToken = tuple[int, float, int]  # a token id, its log-probability, and its rank
# Of tuples, so that the garbage collector does not look at them again and again.
Entry = tuple[LikelyToken, ...]


class Logprobs:
    """An entry for each token: the token itself, then the most likely others.

    `prompt` has the entries of the prompt's second token, third, ..., as far as they are computed.
    `wanted` are the prompt tokens for which the entry of the next token is asked for and has not
    arrived; there are some only if the prompt's length is given. If a generated token is taken
    back, its entry is not read, and the next token at its index replaces it.
    The outputs' form of an entry has texts; it is made when asked for, or before by `prepare`, or
    if it `is_lazy` entry by entry while the caller iterates: hundreds of thousands of objects that
    live at once would keep the garbage collector busy.
    """

    def __init__(self, num_prompt_tokens: int = 0, limit: ReportLimit | None = None) -> None:
        self.is_lazy = False
        self.mode = "raw_logprobs"  # the engine's `logprobs_mode`
        self._limit = limit
        self.prompt: list[Entry] = []
        self.wanted = range(max(0, num_prompt_tokens - 1))
        self._generated: dict[int, Entry] = {}  # by index in `token_ids`
        self._prepared: dict[int, list[TokenLogprob]] = {}  # by index in `token_ids`

    def share(self, budget: int, *queues: Any) -> int:
        """How many tokens of a step's budget the sequence may get: see `ReportLimit.share`.

        Once the whole prompt is reported, all of them.
        """
        if not self.wanted or self._limit is None:
            return budget
        return self._limit.share(budget, *queues)

    def add(self, seq: Sequence, index: int, entry: Entry) -> None:
        """Keep the entry of the token at `index`. Prompt tokens come in order."""
        if index >= seq.num_prompt_tokens:
            self._generated[index] = entry
            return
        self.prompt[index - 1 :] = [entry]
        self.wanted = range(index, self.wanted.stop)

    def generated(self, seq: Sequence, start: int) -> list[Entry]:
        """The entries of the known tokens from index `start` on."""
        return [self._generated[index] for index in range(start, seq.num_known_tokens)]

    def since(
        self, seq: Sequence, start: int, tokenizer: Any, end: int | None = None
    ) -> list[list[TokenLogprob]]:
        """The entries of the known tokens from index `start` on, or to `end`, in outputs' form."""
        tokenizer = tokenizer if seq.params.detokenize else None
        indices = range(start, seq.num_known_tokens if end is None else end)
        if self.is_lazy:
            return Entries([self._generated[index] for index in indices], tokenizer)
        return [
            self._prepared.get(index) or _with_texts(self._generated[index], tokenizer)
            for index in indices
        ]

    def total(self, seq: Sequence) -> float:
        """The sum of the log-probabilities of the generated tokens."""
        return sum(entry[0][1] for entry in self.generated(seq, seq.num_prompt_tokens))

    def of_prompt(self, tokenizer: Any) -> list[list[TokenLogprob] | None]:
        """The entries of the prompt's tokens, in the outputs' form; None for the first token."""
        if self.is_lazy:
            return Entries([None, *self.prompt], tokenizer)
        entries = enumerate(self.prompt, 1)
        return [
            None,
            *(
                self._prepared.get(index) or _with_texts(entry, tokenizer)
                for index, entry in entries
            ),
        ]

    def prepare(self, seq: Sequence, tokenizer: Any) -> Steps[None]:
        """Make the outputs' form of all entries of a sequence that has ended, entry by entry."""
        tokenizer = tokenizer if seq.params.detokenize else None
        known = seq.num_known_tokens if seq.params.logprobs is not None else 0
        generated = (
            (index, self._generated[index]) for index in range(seq.num_prompt_tokens, known)
        )
        for index, entry in itertools.chain(enumerate(self.prompt, 1), generated):
            self._prepared[index] = _with_texts(entry, tokenizer)
            yield len(entry)


class Entries(list[Any]):
    """A list of entries that has their outputs' form whenever it is iterated over."""

    def __init__(self, entries: list[Any], tokenizer: Any) -> None:
        super().__init__(entries)
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            yield None if entry is None else _with_texts(entry, self._tokenizer)


def _with_texts(entry: Entry, tokenizer: Any) -> list[TokenLogprob]:
    if tokenizer is None:
        return [TokenLogprob(token_id=i, text="", logprob=p, rank=rank) for i, p, rank in entry]
    known = token_texts(tokenizer)
    return [
        TokenLogprob(token_id=i, text=token_text(i, tokenizer, known), logprob=p, rank=rank)
        for i, p, rank in entry
    ]
