"""Proposer: guesses the next tokens of sequences on the host."""

from typing import Protocol

from nanovllm.engine.schedule.sequence import Sequence


class Proposer(Protocol):
    """Guesses the next tokens of sequences. Any guess is allowed, because it is verified.

    It may keep data about a sequence as long as the sequence exists.
    """

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Drafts for each sequence, up to the number in `most`. All their tokens are known."""

    def reset(self) -> None:
        """Drop state that an interrupt may have left half done."""
