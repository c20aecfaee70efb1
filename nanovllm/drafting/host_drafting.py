"""HostDrafting: drafts that the host finds, in a sequence's own text or in its grammar."""

from collections.abc import Callable, Collection, Iterable, Iterator

from nanovllm.drafting.costs import Costs
from nanovllm.drafting.pace import Outlook, Pace
from nanovllm.drafting.paced_drafting import PacedDrafting
from nanovllm.drafting.proposer import Proposer
from nanovllm.drafting.step_sizes import MOST_DRAFTS
from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.drafting import Drafts
from nanovllm.engine.schedule.sequence import PENDING, Sequence


class HostDrafting(PacedDrafting):
    """Asks a `proposer` for drafts that are worth their cost, and checks which were right.

    With a `grammar` it also drafts up to `most_forced` forced tokens. These are not guesses: they
    always pay, and the pace of their sequence does not count them.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        most_drafts: int,
        make_pace: Callable[[Outlook], Pace] = Pace,
        costs: Costs | None = None,
        longest: int | None = None,
        grammar: Proposer | None = None,
        most_forced: int = 0,
    ) -> None:
        super().__init__(most_drafts, make_pace, costs, longest)
        self.proposer, self.grammar, self.most_forced = proposer, grammar, most_forced
        self.accepted_at = [0] * (most_drafts or most_forced)
        self._forced: set[Sequence] = set()  # sequences with forced drafts in the step in flight

    def plan(
        self, seqs: list[Sequence], prompts: list[Sequence], budget: int, caches: Caches
    ) -> Drafts:
        """Drafts for some of `seqs`, when everything else in the step is scheduled."""
        num_tokens = len(seqs) + sum(seq.num_scheduled_tokens for seq in prompts)
        return Drafts(self.draft(seqs, num_tokens, budget - num_tokens, caches))

    def must_wait(
        self,
        batch: Batch,
        running: Collection[Sequence],
        has_prompts: Callable[[], bool],
        caches: Caches,  # noqa: ARG002
    ) -> bool:
        """Whether the step has drafts, or a sequence should have some in the next one."""
        return bool(batch.drafts) or self.wants(running, has_prompts())

    def wants(self, seqs: Collection[Sequence], has_prompts: bool = False) -> bool:
        """Whether any of these should have drafts as soon as its tokens are known.

        `has_prompts`: whether prompts are computed in the same step.
        """
        if self.grammar is not None and any(seq.parts.constraint is not None for seq in seqs):
            return True
        candidates = [*map(self.candidate, seqs)] if self.most_drafts else []
        num_tokens = len(candidates) + has_prompts
        return any(self.costs.worthwhile(candidates, num_tokens, waits=True))

    def draft(
        self, seqs: list[Sequence], num_tokens: int, budget: int, caches: Caches
    ) -> dict[Sequence, list[int]]:
        """Drafts for some of `seqs`, at most `budget` in all, in a step of `num_tokens` other
        tokens.

        They take only free blocks that nothing else in the step needs. A sequence with forced
        tokens gets no guesses after them.
        """
        most_each = MOST_DRAFTS // max(1, len(seqs))
        forced = self._force(seqs, most_each, budget, caches) if self.grammar is not None else {}
        self._forced = {*forced}
        if not self.most_drafts:
            return forced
        num_forced = sum(map(len, forced.values()))
        num_tokens, budget = num_tokens + num_forced, budget - num_forced
        others = [seq for seq in seqs if seq not in forced] if forced else seqs
        most: dict[Sequence, int] = {}
        candidates = [self.candidate(seq, not seq.num_pending_tokens) for seq in others]
        numbers = self.costs.worthwhile(candidates, num_tokens, waits=True)
        for seq, number in zip(others, numbers, strict=True):
            number = min(number, budget, most_each)
            room = self.take_room(seq, number, caches)
            if room > 0:
                most[seq] = room
                budget -= room
        guessed = {seq: tokens for seq, tokens in self._propose(most, caches).items() if tokens}
        return forced | guessed

    def _force(
        self, seqs: list[Sequence], most_each: int, budget: int, caches: Caches
    ) -> dict[Sequence, list[int]]:
        """The forced tokens of sequences that have some, as many as there is room for."""
        asked = [s for s in seqs if s.parts.constraint is not None and not s.num_pending_tokens]
        if not asked:
            return {}
        assert self.grammar is not None
        most = [min(most_each, self.most_forced)] * len(asked)
        drafts = {}
        for seq, tokens in zip(asked, self.grammar.propose(asked, most), strict=True):
            room = self.take_room(seq, min(len(tokens), budget), caches)
            if room > 0:
                drafts[seq] = tokens[:room]
                budget -= room
        return drafts

    def _propose(self, most: dict[Sequence, int], caches: Caches) -> dict[Sequence, list[int]]:
        """The proposer's drafts: for each sequence at most the number in `most`.

        Blocks that the drafts do not need are freed.
        """
        if not most:
            return {}
        assert self.proposer is not None
        asked = [*most]
        proposed = self.proposer.propose(asked, [*most.values()])
        drafts = {seq: tokens[: most[seq]] for seq, tokens in zip(asked, proposed, strict=True)}
        for seq, tokens in drafts.items():
            caches.rewind(seq, seq.num_tokens + len(tokens))
        return drafts

    def collect(
        self, batch: Batch, results: list[int], caches: Caches
    ) -> Iterable[tuple[Sequence, int]]:
        """The drawn tokens, up to the first one after a wrong draft."""
        drawn = zip(batch.sampling_seqs, results, strict=True)
        return self._collect(batch, drawn, caches) if batch.drafts else drawn

    def _collect(
        self, batch: Batch, drawn: Iterable[tuple[Sequence, int]], caches: Caches
    ) -> Iterator[tuple[Sequence, int]]:
        yield from self.accepted(batch, drawn)
        self.settle(batch, caches)

    def accepted(
        self, batch: Batch, drawn: Iterable[tuple[Sequence, int]]
    ) -> Iterator[tuple[Sequence, int]]:
        """The tokens that count: the first one of each sequence, and those after right drafts."""
        counts, before = True, PENDING
        for (seq, token_id), offset in zip(drawn, batch.offsets, strict=True):
            counts = offset == 0 or (counts and batch.drafts[seq][offset - 1] == before)
            if counts:
                yield seq, token_id
            before = token_id

    def settle(self, batch: Batch, caches: Caches) -> None:
        """Remove the tokens and blocks of wrong drafts, when the accepted tokens are known.

        Right drafts count as cached tokens.
        """
        for seq, drafts in batch.drafts.items():
            if not seq.room:  # aborted
                continue
            seq.drop_pending()
            end = seq.num_tokens - 1
            num_accepted, learns = max(0, end - seq.num_cached_tokens), seq not in self._forced
            self.count(batch, seq, len(drafts), num_accepted, learns)
            seq.num_cached_tokens = end
            caches.publish(seq, end)
            caches.rewind(seq, end)
            caches.pass_by(seq)
        self._forced = set()

    def reset(self) -> None:
        """Drop state that an interrupt may have left half done."""
        self._forced = set()
        if self.proposer is not None:
            self.proposer.reset()
