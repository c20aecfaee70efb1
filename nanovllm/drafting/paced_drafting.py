"""PacedDrafting: choose the number of drafts by how many were right lately, and count both."""

import sys
from collections.abc import Callable, Iterable

from nanovllm.drafting.costs import Candidate, Costs, TokenCosts
from nanovllm.drafting.pace import Outlook, Pace
from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.metrics import Metric, draft_metrics


class PacedDrafting(Drafting):
    """The common part of drafting on the host and on the device.

    A sequence gets up to `most_drafts` in a step, if `costs` finds that they save time at its pace.
    Sequences of `longest` tokens get none.
    """

    def __init__(
        self,
        most_drafts: int,
        make_pace: Callable[[Outlook], Pace] = Pace,
        costs: Costs | None = None,
        longest: int | None = None,
    ) -> None:
        self.most_drafts, self.longest = most_drafts, longest or sys.maxsize
        self.costs = TokenCosts() if costs is None else costs
        self.num_drafts = 0  # how often a sequence had drafts in a step
        self.num_drafted = 0  # drafted tokens
        self.accepted_at = [0] * most_drafts  # accepted tokens, by their place among the drafts
        self._make_pace, self._outlook = make_pace, Outlook()

    def metrics(self, model: str) -> list[Metric]:
        """The counts with vLLM's names, if the option asks for drafts or some have been made."""
        if not self.most_drafts and not self.num_drafts:
            return []
        return draft_metrics(model, self.num_drafts, self.num_drafted, self.accepted_at)

    def give_back(self, running: Iterable[Sequence], caches: Caches) -> None:
        """Free the blocks that sequences keep for drafts of an earlier step."""
        for seq in running:
            if not seq.num_possible_tokens:
                caches.rewind(seq, len(seq.token_ids))

    def take_room(self, seq: Sequence, number: int, caches: Caches) -> int:
        """Allocate blocks for `number` drafts of `seq`; returns how many drafts have blocks."""
        if number < 1:
            return 0
        sure = seq.num_tokens + seq.num_possible_tokens
        return caches.grow(seq, min(sure + number, seq.max_num_tokens - 1)) - sure

    def candidate(self, seq: Sequence, may_draft: bool = True) -> Candidate:
        """The sequence with its limit of drafts; one more token always comes after them."""
        num_tokens, end = len(seq.token_ids), min(seq.max_num_tokens - 1, self.longest)
        limit = min(self.most_drafts, end - num_tokens)
        if limit < 0 or not may_draft:
            limit = 0
        return Candidate(seq.parts.pace or self._pace(seq), num_tokens, limit)

    def count(
        self, batch: Batch, seq: Sequence, num_drafts: int, num_accepted: int, learns: bool = True
    ) -> None:
        """Count a sequence's drafts in a step: the first `num_accepted` were right.

        If it `learns`, so does the sequence's pace. Where a step has drafts for all sequences, a
        sequence without any counts as if it had a wrong one.
        """
        batch.num_drafted += num_drafts
        batch.num_accepted += num_accepted
        if num_drafts:
            self.num_drafts += 1
        self.num_drafted += num_drafts
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))  # for many forced tokens
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        judged = num_accepted
        if seq.finish_reason is None:
            judged = max(num_drafts, 1) if batch.num_drafts else num_drafts
        if judged and learns:
            self._pace(seq).learn(len(seq.token_ids), judged, num_accepted)

    def _pace(self, seq: Sequence) -> Pace:
        if seq.parts.pace is None:
            seq.parts.pace = self._make_pace(self._outlook)
        pace: Pace = seq.parts.pace
        return pace
