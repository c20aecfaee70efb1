"""Logprobs: the log-probabilities of a sequence's tokens, kept as they arrive from the device."""

from nanovllm.engine.sequence import Sequence

LikelyToken = tuple[int, float, int]  # a token id, its log-probability, and its rank


class Logprobs:
    """A follower with an entry for each token: the token itself, then the most likely others.

    `prompt` holds those of the prompt's second token, third, ..., as far as they are computed.
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

    def update(self, seq: Sequence) -> None:
        """Drop the entry of a token that was taken back: another one may come in its index."""
        self._generated.pop(seq.num_known_tokens, None)

    def reset(self) -> None:
        """Keep all: an entry is stored whole or not at all."""
