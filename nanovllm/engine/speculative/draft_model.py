"""Draft model: a smaller model continues sequences, a token a step, with the keys of their draws.

It tracks what the draft model has computed of each sequence; it has no tensors.
"""

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import hash_block
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus

# So many missing tokens are computed by decode steps, where these are graphs.
MOST_REPEATED = 4
# Steps that are launched before the first one's tokens are waited for. The device table has buffers
# for the changes of this number and one more.
MOST_IN_FLIGHT = 3


class Runner(Protocol):
    """Computes steps with the draft model, in its own KV pool."""

    def launch(self, batch: Batch) -> Any:
        """Begin to compute a step. Input tokens may be in flight."""

    def wait(self, launched: Any) -> list[int]:
        """Wait for a step's tokens."""

    def recover(self) -> None:
        """Start over after an interrupt."""

    def rewrite_tokens(self, seqs: list[Sequence]) -> None:
        """Let the next decode step read the last tokens of `seqs` from the host."""


class DraftCounts:
    """The counts of a sequence's tokens, and of the drafts after them, which may be wrong."""

    def __init__(self, counts: Any, num_known: int) -> None:
        self._counts, self._num_known = counts, num_known
        self._drafts: list[int] = []

    def update(self, own: Sequence) -> None:
        """Count the drafts that are not in flight."""
        self._drafts = own.token_ids[self._num_known : own.num_known_tokens]

    def after(self, drafts: list[int]) -> Any:
        """As the sequence's counts, if those drafts and then these came next."""
        return self._counts.after(self._drafts + drafts)


class Shadow:
    """What the draft model computes of a sequence: a copy with cached tokens of its own.

    The copy has the same blocks, seed and parameters: its draws have the keys of the sequence's.
    Its first `num_known` tokens are the sequence's; drafts may follow. The first
    `seq.num_cached_tokens` have been computed. The first `num_noted` blocks are noted as full.
    """

    def __init__(self, seq: Sequence) -> None:
        self.seq = own = copy.copy(seq)
        own.token_ids, own.block_hashes = list(seq.token_ids), list(seq.block_hashes)
        own.release_cache()
        own.logprobs = own.text = None  # nothing of a draft is reported
        own.followers = ()
        self.num_known = own.num_tokens
        self.num_noted = 0

    def follow(self, seq: Sequence) -> None:
        """Take over the sequence's tokens; drafts that were not accepted are not cached."""
        own, known, token_ids = self.seq, self.num_known, seq.token_ids
        end = min(own.num_cached_tokens, len(token_ids) - 1)
        while known < end and own.token_ids[known] == token_ids[known]:
            known += 1
        own.num_cached_tokens = min(known, end)
        own.token_ids[self.num_known :] = token_ids[self.num_known :]
        self.num_known = len(token_ids)
        if seq.counts is not None:
            own.counts = DraftCounts(seq.counts, self.num_known)


class DraftModelProposer:
    """A proposer whose drafts are what another model draws.

    The draft model's KV pool has the blocks of the model's pool, by the same numbers, so that a
    sequence's block table serves both. `_contents` notes what was last computed of each block: the
    hash of a full one and of all before it, or ~seq_id of the sequence that has filled a part.
    By that, a new table's leading blocks are known to be computed: of a cached prefix, of the
    prompt that a fork shares, or of a sequence that was preempted.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_sizes: tuple[int, int],
        longest: int,
        repeats_steps: bool,
    ) -> None:
        """`vocab_sizes` are the model's and the draft model's; `longest` is the latter's length."""
        self._runner = runner
        self._block_size = config.kvcache_block_size
        self._num_blocks = config.num_kvcache_blocks
        self._budget = config.max_num_batched_tokens
        self._vocab_size, self._own_vocab_size = vocab_sizes
        self.longest = longest
        self._repeats_steps = repeats_steps
        self.reset()

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        """Drafts of one sequence after the other; none where the draft model cannot see all."""
        numbers: dict[Sequence, int] = {}  # by copy
        asked = [
            self._ask(seq, min(number, self.longest - seq.num_tokens), numbers)
            for seq, number in zip(seqs, most, strict=True)
        ]
        if numbers:
            self._first_drafts(list(numbers))
        for index in range(1, max(numbers.values(), default=0)):
            self._decode([own for own, number in numbers.items() if number > index])
        while self._in_flight:
            self._take_tokens()
        return [self._drafts(shadow) if shadow else [] for shadow in asked]

    def reset(self) -> None:
        """Drop all that was computed: the sequences' blocks start over, too."""
        self._shadows: WeakKeyDictionary[Sequence, Shadow] = WeakKeyDictionary()
        self._contents: list[int | None] = [None] * self._num_blocks
        # Steps, and the sequences that their tokens go to.
        self._in_flight: deque[tuple[Any, list[Sequence]]] = deque()
        self._runner.recover()

    def _ask(self, seq: Sequence, number: int, numbers: dict[Sequence, int]) -> Shadow | None:
        """The shadow of a sequence that shall have drafts, entered in `numbers`."""
        if number < 1 or not self._knows_ids(seq):
            return None
        shadow = self._shadows.get(seq)
        if shadow is None:
            self._drop_others()
            shadow = self._shadows[seq] = Shadow(seq)
        shadow.follow(seq)
        if shadow.seq.block_table is not seq.block_table:
            self._change_table(shadow, seq)
        shadow.seq.num_cached_tokens = max(
            shadow.seq.num_cached_tokens, seq.num_passed_blocks * self._block_size
        )
        self._note(shadow, seq, number)
        numbers[shadow.seq] = number
        return shadow

    def _knows_ids(self, seq: Sequence) -> bool:
        """Whether all ids that a step may read are in the draft model's vocabulary."""
        if self._own_vocab_size >= self._vocab_size:
            return True
        params, shadow = seq.params, self._shadows.get(seq)
        start = shadow.num_known if shadow else 0
        named = (params.allowed_token_ids or (), params.logit_bias or (), seq.stop_token_ids)
        groups: list[Iterable[int]] = [seq.token_ids[start:], *named, *seq.bad_words]
        return all(i < self._own_vocab_size for group in groups for i in group)

    def _drop_others(self) -> None:
        """Drop the shadows of sequences that do not run, whose rows in the table others need."""
        for seq in list(self._shadows):
            if seq.status is not SequenceStatus.RUNNING:
                del self._shadows[seq]

    def _change_table(self, shadow: Shadow, seq: Sequence) -> None:
        """Take over a new block table; only what its blocks hold of the sequence stays cached."""
        own, size, before = shadow.seq, self._block_size, shadow.seq.block_table
        hashes = self._hashes(own)
        count = seq.num_passed_blocks * size
        for index in range(seq.num_passed_blocks, len(seq.block_table)):
            block, end = seq.block_table[index], (index + 1) * size
            if end < own.num_tokens and self._contents[block] == hashes[index]:
                count = end
            elif self._contents[block] == ~own.seq_id and before[index : index + 1] == [block]:
                count = max(count, min(own.num_cached_tokens, end))
            if count < end:
                break
        own.block_table = seq.block_table
        own.num_cached_tokens = count
        shadow.num_noted = 0

    def _note(self, shadow: Shadow, seq: Sequence, number: int) -> None:
        """Note what the blocks will hold when the known tokens and the drafts are computed."""
        own, size = shadow.seq, self._block_size
        hashes = self._hashes(own)
        end = -(-(own.num_tokens + number) // size)
        for index in range(max(shadow.num_noted, seq.num_passed_blocks), end):
            is_known = index < len(hashes)
            self._contents[seq.block_table[index]] = hashes[index] if is_known else ~own.seq_id
        shadow.num_noted = len(hashes)

    def _hashes(self, own: Sequence) -> list[int]:
        """The hashes of its full blocks, each computed once."""
        hashes, size = own.block_hashes, self._block_size
        for index in range(len(hashes), own.num_tokens // size):
            parent = hashes[index - 1] if index else 0
            hashes.append(hash_block(parent, own.token_ids[index * size : (index + 1) * size]))
        return hashes

    def _first_drafts(self, seqs: list[Sequence]) -> None:
        """Compute what is missing of `seqs`, and draw the token after each."""
        missing = max(seq.num_uncached_tokens for seq in seqs)
        if missing > (MOST_REPEATED if self._repeats_steps else 1):
            self._prefill(seqs)
            return
        for left in range(missing - 1, 0, -1):
            self._repeat([seq for seq in seqs if seq.num_uncached_tokens > left])
        self._runner.rewrite_tokens(seqs)
        self._decode(seqs)

    def _prefill(self, seqs: list[Sequence]) -> None:
        """Compute the missing tokens, as many in a step as its budget allows."""
        while seqs:
            chunk, budget = [], self._budget
            for seq in seqs:
                if budget:
                    seq.num_scheduled_tokens = min(budget, seq.num_uncached_tokens)
                    budget -= seq.num_scheduled_tokens
                    chunk.append(seq)
            batch = Batch(chunk, is_prefill=True)
            self._launch(batch)
            done = set(batch.sampling_seqs)
            seqs = [seq for seq in seqs if seq not in done]

    def _repeat(self, seqs: list[Sequence]) -> None:
        """Compute one token of each that a known token follows: what is drawn does not count."""
        rest = [seq.token_ids[seq.num_cached_tokens + 1 :] for seq in seqs]
        for seq in seqs:
            del seq.token_ids[seq.num_cached_tokens + 1 :]
        self._runner.rewrite_tokens(seqs)
        self._decode(seqs)
        self._in_flight[-1][1].clear()
        for seq, token_ids in zip(seqs, rest, strict=True):
            seq.token_ids[-1:] = token_ids
            seq.num_pending_tokens = 0

    def _decode(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            seq.num_scheduled_tokens = 1
        self._launch(Batch(seqs, is_prefill=False))

    def _launch(self, batch: Batch) -> None:
        """Launch a step. The next one can be launched before its tokens are known."""
        if len(self._in_flight) == MOST_IN_FLIGHT:
            self._take_tokens()
        self._in_flight.append((self._runner.launch(batch), list(batch.sampling_seqs)))
        for seq in batch.seqs:
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
        for seq in batch.sampling_seqs:
            seq.token_ids.append(PENDING)
            seq.num_pending_tokens += 1

    def _take_tokens(self) -> None:
        """Wait for the first step in flight, and put its tokens in their places."""
        launched, seqs = self._in_flight.popleft()
        for seq, token_id in zip(seqs, self._runner.wait(launched), strict=bool(seqs)):
            seq.token_ids[-seq.num_pending_tokens] = token_id
            seq.num_pending_tokens -= 1

    def _drafts(self, shadow: Shadow) -> list[int]:
        """The drafts, up to one that is no token of the model."""
        drafts = shadow.seq.token_ids[shadow.num_known :]
        outside = (i for i, token_id in enumerate(drafts) if token_id >= self._vocab_size)
        return drafts[: next(outside, len(drafts))]
