"""Forced tokens: drafts of a grammar that leaves a sequence only one text to go on with."""

from typing import Protocol

from nanovllm.engine.schedule.sequence import Sequence


class Grammar(Protocol):
    """What a sequence's `constraint` must know for that."""

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that must come next, `most` at most. All that it has are known."""


class GrammarProposer:
    """A proposer for sequences with a constraint: the tokens that these force. Others get none.

    They are right, whatever the model computes: the request ends with an error where another of its
    parameters excludes one.
    """

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Each sequence's forced tokens."""
        return [_forced(seq.constraint, seq, n) for seq, n in zip(seqs, most, strict=True)]

    def reset(self) -> None:
        """Do nothing: it keeps nothing."""


def _forced(grammar: Grammar | None, seq: Sequence, most: int) -> list[int]:
    return [] if grammar is None or most < 1 else grammar.forced(seq, most)
