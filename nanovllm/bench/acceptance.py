"""Drafts that are right by chance: the speed of speculation at a given acceptance.

A model with random weights has no text to guess. Here a seeded generator decides which drafts are
right, whatever the model draws, and the output has no meaning. Everything else is as in any run:
how many drafts a sequence gets, what a step with them computes and draws, and how its blocks are
managed.
"""

import random
from collections.abc import Iterable, Iterator

from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.proposer import Proposer
from nanovllm.drafting.table_rows import TableRows
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.llm import LLM


class PaddedProposer:
    """A proposer that always returns as many drafts as the step has room for.

    The engine's own proposer is called first, because its time must be measured too; random tokens
    replace drafts that it does not find.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, rng: random.Random) -> None:
        self._proposer, self._vocab_size, self._rng = proposer, vocab_size, rng

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Exactly `most` drafts for each sequence."""
        proposed = zip(self._proposer.propose(seqs, most), most, strict=True)
        tokens = range(self._vocab_size)
        return [
            drafts[:n] + self._rng.choices(tokens, k=max(0, n - len(drafts)))
            for drafts, n in proposed
        ]

    def reset(self) -> None:
        """Drop state that an interrupt may have left half done."""
        self._proposer.reset()


class AcceptByChance(HostDrafting):
    """Drafting that accepts a draft with a given chance if those before it are accepted.

    An accepted draft becomes the sequence's token, in place of the one that was drawn.
    """

    def __init__(self, engines: HostDrafting, chance: float, vocab_size: int, seed: int) -> None:
        self._chance, self._rng = chance, random.Random(seed)
        own = engines.proposer
        proposer = own and PaddedProposer(own, vocab_size, random.Random(seed))
        super().__init__(
            proposer, engines.most_drafts, costs=engines.costs, longest=engines.longest
        )

    def accepted(
        self, batch: Batch, drawn: Iterable[tuple[Sequence, int]]
    ) -> Iterator[tuple[Sequence, int]]:
        """The accepted drafts of each sequence, and the token that was drawn after them."""
        counts = True
        for (seq, token_id), offset in zip(drawn, batch.offsets, strict=True):
            if not (counts or offset == 0):
                continue
            drafts = batch.drafts.get(seq, [])[offset:]
            counts = bool(drafts) and self._rng.random() < self._chance
            yield seq, drafts[0] if counts else token_id


def accept_by_chance(llm: LLM, chance: float, seed: int) -> None:
    """Make this engine accept drafts with the probability `chance`. It must make drafts.

    If the device accepts drafts, the chance is in its table.
    """
    engines, rows = llm.scheduler.drafting, llm.model_runner.ledger.ahead
    if isinstance(rows, TableRows):
        rows.set_chance(chance)
        return
    assert isinstance(engines, HostDrafting)
    llm.scheduler.draft_with(AcceptByChance(engines, chance, llm.model_config.vocab_size, seed))
