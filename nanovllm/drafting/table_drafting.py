"""TableDrafting: drafts that the device guesses and accepts, in the rows of its table."""

from collections.abc import Callable, Collection, Iterable, Iterator

from nanovllm.drafting.costs import Costs
from nanovllm.drafting.pace import Outlook, Pace
from nanovllm.drafting.paced_drafting import PacedDrafting
from nanovllm.drafting.step_sizes import MOST_DRAFTS, most_within
from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.drafting import NO_DRAFTS, Drafts
from nanovllm.engine.schedule.sequence import PENDING, Sequence

# If no draft pays in a step of at least MANY sequences, the next QUIET_STEPS steps have none:
# looking again costs 1 to 3 us a sequence.
QUIET_STEPS, MANY = 3, 9


class TableDrafting(PacedDrafting):
    """Chooses how many drafts the sequences of a decode step get: the same number for all.

    Steps that compute prompts have none. If a step `mixes` prompts and decodes, the host must know
    all tokens.
    """

    fits_mixed_steps = False

    def __init__(
        self,
        most_drafts: int,
        make_pace: Callable[[Outlook], Pace] = Pace,
        costs: Costs | None = None,
        longest: int | None = None,
        mixes: bool = False,
    ) -> None:
        super().__init__(most_drafts, make_pace, costs, longest)
        self._mixes = mixes
        self._quiet = 0  # steps in which no sequence will want drafts

    def plan(
        self, seqs: list[Sequence], prompts: list[Sequence], budget: int, caches: Caches
    ) -> Drafts | None:
        """How many drafts each sequence has.

        None if there should be no drafts, but drafts in flight may still be accepted.
        """
        if prompts:
            return NO_DRAFTS
        number = self.draft(seqs, budget, caches)
        if number == 0 and any(seq.num_possible_tokens for seq in seqs):
            return None
        return Drafts({}, number)

    def draft(self, seqs: list[Sequence], budget: int, caches: Caches) -> int:
        """How many drafts each of `seqs` has in a decode step.

        Sequences take blocks for the most tokens that they may get, as long as there are free
        blocks; the device uses no others.
        """
        if self._quiet:
            self._quiet -= 1
            return 0
        candidates = [*map(self.candidate, seqs)]
        waits = any(seq.reads_tokens for seq in seqs)  # for the drafts, before it draws
        numbers = self.costs.worthwhile(candidates, len(seqs), waits)
        number = min(max(numbers), budget // len(seqs) - 1, MOST_DRAFTS // len(seqs))
        number = most_within(number, self.most_drafts)
        if number == 0:
            self._quiet = QUIET_STEPS if len(seqs) >= MANY else 0
        for seq, candidate in zip(seqs, candidates, strict=True):
            self.take_room(seq, min(number, candidate.limit), caches)
        return number

    def must_wait(
        self,
        batch: Batch,
        running: Collection[Sequence],
        has_prompts: Callable[[], bool],  # noqa: ARG002
        caches: Caches,
    ) -> bool:
        """Whether the next step needs to know which drafts of `batch` were right.

        A decode step needs this if blocks could be missing. Otherwise a row has a block for its
        next token for any number of accepted drafts.
        """
        if not batch.num_drafts:
            return False
        most_new = 2 * self.most_drafts + 1  # in the step in flight and the next one
        return self._mixes or not caches.any_can_grow(len(running), most_new)

    def collect(
        self, batch: Batch, results: list[int], caches: Caches
    ) -> Iterable[tuple[Sequence, int]]:
        """The tokens that the device has accepted."""
        if not batch.num_drafts:
            return zip(batch.sampling_seqs, results, strict=True)
        return self._collect(batch, results, caches)

    def _collect(
        self, batch: Batch, outcome: list[int], caches: Caches
    ) -> Iterator[tuple[Sequence, int]]:
        """The accepted tokens, from the `outcome` of the device's `accept`.

        When the tokens of a sequence have been added, its blocks are published. Blocks that only
        wrong drafts needed are freed, if no later step may need them.
        """
        width = batch.num_drafts + 3
        for index, seq in enumerate(batch.seqs):
            count, num_drafts, *tokens = outcome[index * width : (index + 1) * width]
            if not seq.num_pending_tokens:
                continue  # it has finished
            expect(seq, count, batch.num_drafts)
            before = seq.num_known_tokens
            for token_id in tokens[:count]:
                yield seq, token_id
                if seq.finish_reason is not None:
                    break
            end = seq.num_known_tokens - 1
            self.count(batch, seq, num_drafts, max(0, end - before))
            if not seq.room:
                continue  # it was preempted
            caches.publish(seq, end)
            caches.accept(seq, batch, before - 1, end)
            if seq.finish_reason is not None:
                continue  # a later step may count a token that the device has not computed
            if not seq.num_possible_tokens and not seq.num_scheduled_tokens:
                caches.rewind(seq, max(end, seq.num_cached_tokens))
            caches.pass_by(seq)


def expect(seq: Sequence, num_tokens: int, num_drafts: int) -> None:
    """Make room for the tokens that a step with drafts has added, in place of the certain one."""
    at = seq.num_known_tokens
    seq.token_ids[at : at + 1] = [PENDING] * num_tokens
    seq.num_pending_tokens += num_tokens - 1
    seq.num_possible_tokens -= num_drafts
    if seq.room:  # else it was preempted meanwhile
        seq.num_cached_tokens += num_tokens - 1
