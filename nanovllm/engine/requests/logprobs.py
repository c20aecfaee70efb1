"""Logprobs: the log-probabilities of a sequence's tokens, kept as they arrive from the device."""

from typing import Any

from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.outputs import TokenLogprob

LikelyToken = tuple[int, float, int]  # a token id, its log-probability, and its rank


class Logprobs:
    """An entry for each token: the token itself, then the most likely others.

    `prompt` has the entries of the prompt's second token, third, ..., as far as they are computed.
    `wanted` are the prompt tokens for which the entry of the next token is asked for and has not
    arrived; there are some only if the prompt's length is given. If a generated token is taken
    back, its entry is not read, and the next token at its index replaces it.
    """

    def __init__(self, num_prompt_tokens: int = 0) -> None:
        self.prompt: list[list[LikelyToken]] = []
        self.wanted = range(max(0, num_prompt_tokens - 1))
        self._generated: dict[int, list[LikelyToken]] = {}  # by index in `token_ids`

    def add(self, seq: Sequence, index: int, entry: list[LikelyToken]) -> None:
        """Keep the entry of the token at `index`. Prompt tokens come in order."""
        if index >= seq.num_prompt_tokens:
            self._generated[index] = entry
            return
        self.prompt[index - 1 :] = [entry]
        self.wanted = range(index, self.wanted.stop)

    def generated(self, seq: Sequence, start: int) -> list[list[LikelyToken]]:
        """The entries of the known tokens from index `start` on."""
        return [self._generated[index] for index in range(start, seq.num_known_tokens)]

    def since(self, seq: Sequence, start: int, tokenizer: Any) -> list[list[TokenLogprob]]:
        """The entries of the known tokens from index `start` on, in the outputs' form."""
        tokenizer = tokenizer if seq.params.detokenize else None
        return [_with_texts(entry, tokenizer) for entry in self.generated(seq, start)]

    def of_prompt(self, tokenizer: Any) -> list[list[TokenLogprob] | None]:
        """The entries of the prompt's tokens, in the outputs' form; None for the first token."""
        return [None, *(_with_texts(entry, tokenizer) for entry in self.prompt)]


def _with_texts(entry: list[LikelyToken], tokenizer: Any) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id=i, text=_token_text(i, tokenizer), logprob=logprob, rank=rank)
        for i, logprob, rank in entry
    ]


def _token_text(token_id: int, tokenizer: Any) -> str:
    """The text of a single token; a part of a character is U+FFFD."""
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text
