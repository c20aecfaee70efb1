"""Proposer: what guesses the next tokens of sequences."""

from typing import Protocol

from nanovllm.engine.sequence import Sequence


class Proposer(Protocol):
    """Guesses what comes after the tokens of sequences. Any guess is allowed: it is verified.

    It may keep what it knows of a sequence beside it, as long as the sequence exists. It is not
    asked about sequences that would be longer than `longest` with its drafts.
    """

    longest: int

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Drafts for each sequence, `most` of each at most. All their tokens are known."""

    def reset(self) -> None:
        """Drop what an interrupt may have left half done."""


class SilentProposer:
    """Guesses nothing, where only the device can guess."""

    longest = 0

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:  # noqa: ARG002
        """No drafts for any sequence."""
        return [[] for _ in seqs]

    def reset(self) -> None:
        """There is nothing to drop."""
