"""Speculator: which sequences get drafts, how many, and what becomes of them."""

import sys
from collections.abc import Callable, Iterable, Iterator

from nanovllm.drafting.costs import Candidate, Costs, TokenCosts
from nanovllm.drafting.grammar_proposer import GrammarProposer
from nanovllm.drafting.ngram_proposer import NgramProposer
from nanovllm.drafting.pace import Outlook, Pace
from nanovllm.drafting.proposer import Proposer
from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence
from nanovllm.engine.schedule.step_size import MOST_DRAFTS, most_within
from nanovllm.metrics import Metric, draft_metrics
from nanovllm.speculative_config import SpeculativeConfig

# Where none of many sequences should have drafts, none has some for so many steps: to look costs 1
# to 3 us a sequence.
QUIET_STEPS, MANY = 3, 9


class Speculator:
    """Asks for drafts where they are worth their cost; counts those that were right.

    Without a `proposer` drafts are `in_table`: the device guesses and accepts them, and a decode
    step has the same number for all its sequences. Sequences of `longest` tokens get no drafts.
    With a `grammar` the host drafts up to `most_forced` tokens that must come. These are no
    guesses: they always pay, and their sequence's pace learns nothing from them.
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
        self.proposer, self.grammar = proposer, grammar
        self.in_table = proposer is None and grammar is None
        self.longest = longest or sys.maxsize
        self.most_drafts, self.most_forced = most_drafts, most_forced
        self.costs = TokenCosts() if costs is None else costs
        self.num_drafts = 0  # of sequences and steps
        self.num_drafted = 0  # tokens
        self.accepted_at = [0] * (most_drafts or most_forced)  # tokens, by place
        self._make_pace, self._outlook = make_pace, Outlook()
        self._forced: set[Sequence] = set()  # whose drafts in the step in flight are forced
        self._quiet = 0  # steps in which no sequence will want drafts

    def wants(self, seqs: Iterable[Sequence], has_prompts: bool = False) -> bool:
        """Whether any of these should have drafts as soon as its tokens are known.

        `has_prompts`: whether prompts are computed in the same step.
        """
        seqs = [*seqs]
        if self.grammar is not None and any(seq.constraint is not None for seq in seqs):
            return True
        candidates = [*map(self._candidate, seqs)] if self.most_drafts else []
        num_tokens = len(candidates) + has_prompts
        return any(self.costs.worthwhile(candidates, num_tokens, waits=True))

    def draft(
        self, seqs: list[Sequence], num_tokens: int, budget: int, caches: Caches
    ) -> dict[Sequence, list[int]]:
        """Drafts for some of `seqs`, `budget` in all at most, in a step of `num_tokens` others.

        They take free blocks, which nothing else of the step needs, and no more than there are.
        A sequence with forced tokens gets no guesses beside them.
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
        candidates = [self._candidate(seq, not seq.num_pending_tokens) for seq in others]
        numbers = self.costs.worthwhile(candidates, num_tokens, waits=True)
        for seq, number in zip(others, numbers, strict=True):
            number = min(number, budget, most_each)
            room = self._room(seq, number, caches)
            if room > 0:
                most[seq] = room
                budget -= room
        guessed = {seq: tokens for seq, tokens in self._propose(most, caches).items() if tokens}
        return forced | guessed

    def _force(
        self, seqs: list[Sequence], most_each: int, budget: int, caches: Caches
    ) -> dict[Sequence, list[int]]:
        """The forced tokens of those of `seqs` that have some, as many as there is room for."""
        asked = [s for s in seqs if s.constraint is not None and not s.num_pending_tokens]
        if not asked:
            return {}
        assert self.grammar is not None
        most = [min(most_each, self.most_forced)] * len(asked)
        drafts = {}
        for seq, tokens in zip(asked, self.grammar.propose(asked, most), strict=True):
            room = self._room(seq, min(len(tokens), budget), caches)
            if room > 0:
                drafts[seq] = tokens[:room]
                budget -= room
        return drafts

    def plan(self, seqs: list[Sequence], budget: int, caches: Caches) -> int:
        """How many drafts each of `seqs` has in a decode step.

        Sequences take blocks for the most tokens that they may have then, as far as there are free
        ones; the device uses no more.
        """
        if self._quiet:
            self._quiet -= 1
            return 0
        candidates = [*map(self._candidate, seqs)]
        waits = any(seq.reads_tokens for seq in seqs)  # for the drafts, before it draws
        numbers = self.costs.worthwhile(candidates, len(seqs), waits)
        number = min(max(numbers), budget // len(seqs) - 1, MOST_DRAFTS // len(seqs))
        number = most_within(number, self.most_drafts)
        if number == 0:
            self._quiet = QUIET_STEPS if len(seqs) >= MANY else 0
        for seq, candidate in zip(seqs, candidates, strict=True):
            self._room(seq, min(number, candidate.limit), caches)
        return number

    def _room(self, seq: Sequence, number: int, caches: Caches) -> int:
        """Give `seq` blocks for drafts; returns for how many of this number it has blocks."""
        if number < 1:
            return 0
        sure = seq.num_tokens + seq.num_possible_tokens
        return caches.grow(seq, min(sure + number, seq.max_num_tokens - 1)) - sure

    def _propose(self, most: dict[Sequence, int], caches: Caches) -> dict[Sequence, list[int]]:
        """The proposer's drafts, at most as many of each sequence as `most` says.

        Blocks that they do not need are freed.
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

    def counted(
        self, batch: Batch, outcome: list[int], caches: Caches
    ) -> Iterator[tuple[Sequence, int]]:
        """The tokens that the device has accepted.

        When those of a sequence have been taken, its blocks are published. Blocks that only wrong
        drafts needed are freed, if no later step may need them.
        """
        width = batch.num_drafts + 3
        for index, seq in enumerate(batch.seqs):
            count, num_drafts, *tokens = outcome[index * width : (index + 1) * width]
            if not seq.num_pending_tokens:
                continue  # it has finished
            seq.expect(count, batch.num_drafts)
            before = seq.num_known_tokens
            for token_id in tokens[:count]:
                yield seq, token_id
                if seq.finish_reason is not None:
                    break
            end = seq.num_known_tokens - 1
            self._learn(batch, seq, num_drafts, max(0, end - before))
            if not seq.room:
                continue  # it was preempted
            caches.publish(seq, end)
            if seq.finish_reason is not None:
                continue  # a later step may count a token that the device has not computed
            if not seq.num_possible_tokens and not seq.num_scheduled_tokens:
                caches.rewind(seq, max(end, seq.num_cached_tokens))
            caches.pass_by(seq)

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
        """Remove what only wrong drafts had, places and blocks: the tokens that count are known.

        Right drafts count as cached tokens.
        """
        for seq, drafts in batch.drafts.items():
            if not seq.room:  # aborted
                continue
            seq.drop_pending()
            end = seq.num_tokens - 1
            self._learn(batch, seq, len(drafts), end - seq.num_cached_tokens)
            seq.num_cached_tokens = end
            caches.publish(seq, end)
            caches.rewind(seq, end)
            caches.pass_by(seq)
        self._forced = set()

    def metrics(self, model: str) -> list[Metric]:
        """The counts by vLLM's names: if drafts were asked for, or have been made."""
        if not self.most_drafts and not self.num_drafts:
            return []
        return draft_metrics(model, self.num_drafts, self.num_drafted, self.accepted_at)

    def reset(self) -> None:
        """Drop what an interrupt may have left half done."""
        self._forced = set()
        if self.proposer is not None:
            self.proposer.reset()

    def _learn(self, batch: Batch, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts in a step: the first `num_accepted` were right.

        Where a step has drafts for all sequences, one without any counts as if it had a wrong one.
        """
        batch.num_drafted += num_drafts
        batch.num_accepted += num_accepted
        if num_drafts:
            self.num_drafts += 1
        self.num_drafted += num_drafts
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))  # forced ones may be more
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        judged = num_accepted
        if seq.finish_reason is None:
            judged = max(num_drafts, 1) if batch.num_drafts else num_drafts
        if judged and seq not in self._forced:
            self._pace(seq).learn(len(seq.token_ids), judged, num_accepted)

    def _candidate(self, seq: Sequence, may_draft: bool = True) -> Candidate:
        """What decides about its drafts; one more token always comes after them."""
        num_tokens, end = len(seq.token_ids), min(seq.max_num_tokens - 1, self.longest)
        limit = min(self.most_drafts, end - num_tokens)
        if limit < 0 or not may_draft:
            limit = 0
        return Candidate(seq.pace or self._pace(seq), num_tokens, limit)

    def _pace(self, seq: Sequence) -> Pace:
        if seq.pace is None:
            seq.pace = self._make_pace(self._outlook)
        pace: Pace = seq.pace
        return pace


def speculator_of(
    config: SpeculativeConfig | None,
    costs: Costs,
    *,
    in_table: bool,
    longest: int | None,
    most_forced: int = 0,
) -> Speculator | None:
    """The speculator that the option asks for, if it does.

    Without the option it drafts forced tokens, up to `most_forced` of a sequence and step.
    """
    if config is None:
        if not most_forced:
            return None
        config = SpeculativeConfig("grammar", most_forced)
    if config.method == "none":
        return None
    most = config.num_speculative_tokens
    if in_table:
        return Speculator(None, most, costs=costs, longest=longest)
    if config.method == "grammar":
        return Speculator(None, 0, costs=costs, grammar=GrammarProposer(), most_forced=most)
    return Speculator(
        NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max), most, costs=costs,
        longest=longest, grammar=GrammarProposer(), most_forced=most_forced,
    )  # fmt: skip
