"""GrammarProposer: forced tokens as drafts, where a grammar allows only one continuation."""

from typing import Protocol

from nanovllm.engine.schedule.failures import check_repeated
from nanovllm.engine.schedule.sequence import Sequence


class Grammar(Protocol):
    """A sequence's `constraint` that can propose tokens."""

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that must come next, up to `most`. All tokens of `seq` are known."""


class GrammarProposer:
    """A proposer of the tokens that sequences' constraints force. Other sequences get none.

    Forced tokens are right, whatever the model computes: if another parameter of the request
    excludes one of them, the request ends with an error.
    """

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Each sequence's forced tokens."""
        return [_forced(seq.parts.constraint, seq, n) for seq, n in zip(seqs, most, strict=True)]

    def reset(self) -> None:
        """Do nothing: it keeps nothing."""


def _forced(grammar: Grammar | None, seq: Sequence, most: int) -> list[int]:
    """A sequence's forced tokens; none if its grammar fails, as the next draw does then."""
    if grammar is None or most < 1:
        return []
    try:
        return grammar.forced(seq, most)
    except BaseException as error:
        check_repeated(error, lambda: grammar.forced(seq, most))
        return []
