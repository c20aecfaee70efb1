"""Speculator: which sequences get drafts, how many, and what becomes of them."""

from collections.abc import Callable, Iterable, Iterator

from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.engine.speculative.costs import Candidate, Costs, TokenCosts
from nanovllm.engine.speculative.ngram import NgramProposer
from nanovllm.engine.speculative.pace import Outlook, Pace
from nanovllm.engine.speculative.proposer import Proposer
from nanovllm.engine.step_size import MOST_DRAFTS
from nanovllm.metrics import Metric, draft_metrics
from nanovllm.speculative_config import SpeculativeConfig

# After `wants` returned False it returns False for so many steps: to look costs 1 us a sequence.
QUIET_STEPS = 3


class Speculator:
    """Asks a proposer for drafts where they are worth their cost; counts those that were right."""

    def __init__(
        self,
        proposer: Proposer,
        most_drafts: int,
        make_pace: Callable[[Outlook], Pace] = Pace,
        costs: Costs | None = None,
    ) -> None:
        self.proposer = proposer
        self.most_drafts = most_drafts
        self.costs = TokenCosts() if costs is None else costs
        self.num_drafts = 0  # of sequences and steps
        self.num_drafted = 0  # tokens
        self.accepted_at = [0] * most_drafts  # tokens, by place
        self._make_pace, self._outlook = make_pace, Outlook()
        self._quiet = 0  # steps in which no sequence will want drafts

    def wants(self, seqs: Iterable[Sequence], has_prompts: bool = False) -> bool:
        """Whether any of these should have drafts as soon as its tokens are known.

        `has_prompts`: whether prompts are computed in the same step. A False holds for some steps.
        """
        if self._quiet:
            self._quiet -= 1
            return False
        candidates = [*map(self._candidate, seqs)]
        wants = any(self.costs.worthwhile(candidates, len(candidates) + has_prompts))
        if self.costs.waits and not wants:
            self._quiet = QUIET_STEPS
        return wants

    def draft(
        self, seqs: list[Sequence], num_tokens: int, budget: int, blocks: BlockManager
    ) -> dict[Sequence, list[int]]:
        """Drafts for some of `seqs`, `budget` in all at most, in a step of `num_tokens` others.

        They take free blocks, which nothing else of the step needs, and no more than there are. The
        proposer is asked when the sequences have them, as it may compute with them.
        """
        asked: list[Sequence] = []
        most: list[int] = []
        candidates = [self._candidate(seq, not seq.num_pending_tokens) for seq in seqs]
        for seq, number in zip(seqs, self.costs.worthwhile(candidates, num_tokens), strict=True):
            number = min(number, budget, MOST_DRAFTS // len(seqs))  # others may be padded to it
            room = number and blocks.grow(seq, seq.num_tokens + number) - seq.num_tokens
            if room > 0:
                asked.append(seq)
                most.append(room)
                budget -= room
        if not asked:
            return {}
        proposed = zip(asked, most, self.proposer.propose(asked, most), strict=True)
        drafts = {seq: tokens[:room] for seq, room, tokens in proposed}
        for seq, tokens in drafts.items():
            blocks.shrink(seq, seq.num_tokens + len(tokens))
            if not tokens and self.costs.waits:
                self._pace(seq).learn(seq.num_tokens, 1, 0)
        return {seq: tokens for seq, tokens in drafts.items() if tokens}

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

    def settle(self, batch: Batch, blocks: BlockManager) -> None:
        """Remove what only wrong drafts had, places and blocks: the tokens that count are known.

        Right drafts count as cached tokens.
        """
        for seq, drafts in batch.drafts.items():
            if not seq.block_table:  # aborted
                continue
            seq.drop_pending()
            end = seq.num_tokens - 1
            num_accepted = end - seq.num_cached_tokens
            batch.num_accepted += num_accepted
            self._count(len(drafts), num_accepted)
            num_judged = len(drafts) if seq.finish_reason is None else num_accepted
            self._pace(seq).learn(seq.num_tokens, num_judged, num_accepted)
            seq.num_cached_tokens = end
            blocks.publish(seq, end)
            blocks.shrink(seq, end)
            blocks.pass_by(seq)

    def metrics(self, model: str) -> list[Metric]:
        """The counts by vLLM's names."""
        return draft_metrics(model, self.num_drafts, self.num_drafted, self.accepted_at)

    def reset(self) -> None:
        """Drop what an interrupt may have left half done."""
        self.proposer.reset()

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts in a step: the first `num_accepted` were right."""
        self.num_drafts += 1
        self.num_drafted += num_drafts
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def _candidate(self, seq: Sequence, may_draft: bool = True) -> Candidate:
        """What decides about its drafts; one more token always comes after them."""
        num_tokens = len(seq.token_ids)
        end = min(seq.max_num_tokens - 1, self.proposer.longest)
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
    config: SpeculativeConfig | None, costs: Costs, draft_model: Proposer | None
) -> Speculator | None:
    """The speculator that the option asks for, if it does. `draft_model` is None for n-grams."""
    if config is None:
        return None
    ngrams = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculator(draft_model or ngrams, config.num_speculative_tokens, costs=costs)
