"""Logprobs: the log-probabilities of a sequence's tokens, kept as they arrive from the device."""

from nanovllm.engine.schedule.sequence import Sequence

LikelyToken = tuple[int, float, int]  # a token id, its log-probability, and its rank


class Logprobs:
    """An entry for each token: the token itself, then the most likely others.

    `prompt` holds those of the prompt's second token, third, ..., as far as they are computed. A
    generated token that is taken back leaves its entry, which is not read: the next token at its
    index replaces it.
    """

    def __init__(self) -> None:
        self.prompt: list[list[LikelyToken]] = []
        self._generated: dict[int, list[LikelyToken]] = {}  # by index in `token_ids`

    def add(self, seq: Sequence, index: int, entry: list[LikelyToken]) -> None:
        """Keep the entry of the token at `index`. Prompt tokens come in order."""
        if index >= seq.num_prompt_tokens:
            self._generated[index] = entry
            return
        self.prompt[index - 1 :] = [entry]
        seq.num_reported_tokens = index + 1

    def generated(self, seq: Sequence, start: int) -> list[list[LikelyToken]]:
        """The entries of the known tokens from index `start` on."""
        return [self._generated[index] for index in range(start, seq.num_known_tokens)]
