"""Batch: the sequences of a step, from the scheduler to the runner, and its tokens back to them.

Size: how many sequences and queries a decode step has; graphs are captured for sizes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.engine.schedule.sequence import FINISHED, PENDING, Sequence


class SlotCopies(NamedTuple):
    """Pairs of cache slots (from, to) that a step copies: before it computes, and after."""

    before: list[tuple[int, int]]
    after: list[tuple[int, int]]


NO_COPIES = SlotCopies([], [])


class Size(NamedTuple):
    """The numbers of a decode step's sequences, and of queries of each: last token and drafts.

    If it `is_marked`, some sequences may have marks, which a step part reads.
    """

    num_seqs: int
    num_queries: int = 1
    is_marked: bool = False

    @property
    def num_rows(self) -> int:
        """Queries of all sequences."""
        return self.num_seqs * self.num_queries

    def holds(self, other: "Size") -> bool:
        """Whether a graph of this size computes a step of the other."""
        return self.num_seqs >= other.num_seqs and self[1:] == other[1:]


@dataclass(slots=True)
class Batch:
    """The sequences of one step.

    Each computes its `num_scheduled_tokens` tokens after the `num_cached_tokens` in the cache; a
    decode step has one such token for each sequence. The first `num_decodes` sequences decode: some
    of a prefill, all of a decode step. A fork is a sequence and one of its siblings: the sibling
    computes nothing, and samples from the logits of the sequence.

    `drafts` are guesses of the tokens after a decoding sequence's last one. The step computes them
    after the scheduled tokens, and draws the token after each; tokens after right guesses count.
    Where the device guesses, each sequence has up to `num_drafts`, and `drafts` is empty. `copies`
    are those of cache slots, if a cache group has slots.

    `sampling_seqs` has the sequence of each token that the step draws, and `offsets` the number of
    guesses between the sequence's last token and that one: 0, 1, 2, .... Silent sequences generate
    nothing: their keepers want results for their prompts.

    When the step is launched, the scheduler records in `ends` the length up to which it computes
    each of `all_seqs`; when its tokens are known, how many guesses there were and were right.
    """

    seqs: list[Sequence]
    is_prefill: bool
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    num_decodes: int = 0
    drafts: Mapping[Sequence, list[int]] = field(default_factory=dict)
    num_drafts: int = 0
    copies: SlotCopies = NO_COPIES
    all_seqs: list[Sequence] = field(init=False)
    sampling_seqs: list[Sequence] = field(init=False)
    offsets: list[int] = field(init=False)
    silent_seqs: list[Sequence] = field(init=False, default_factory=list)
    ends: list[int] = field(init=False, default_factory=list)
    num_drafted: int = field(init=False, default=0)
    num_accepted: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.all_seqs = self.sampling_seqs = self.seqs
        if not self.is_prefill:
            self.num_decodes = len(self.seqs)
        else:
            self.all_seqs = [*self.seqs, *(sibling for _, sibling in self.forks)]
            self.sampling_seqs = [seq for seq in self.all_seqs if seq.samples]
            self.silent_seqs = [s for s in self.seqs[self.num_decodes :] if not s.generates]
        self.offsets = [0] * len(self.sampling_seqs)
        if self.drafts or self.num_drafts:
            drawn = [
                range(1 + (self.num_drafts or len(self.drafts.get(seq, ()))))
                for seq in self.sampling_seqs
            ]
            self.offsets = [offset for offsets in drawn for offset in offsets]
            self.sampling_seqs = [
                seq for seq, offsets in zip(self.sampling_seqs, drawn, strict=True) for _ in offsets
            ]

    def await_tokens(self) -> None:
        """Add a pending token to the sequences for each token that the step is sure to draw."""
        number = self.num_drafts
        for seq in self.seqs if number else self.sampling_seqs:
            if seq.status is not FINISHED:
                seq.token_ids.append(PENDING)
                seq.num_pending_tokens += 1
                if number:
                    seq.num_possible_tokens += number

    def append_tokens(self, tokens: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """Replace pending tokens by the step's tokens. Returns the sequences that ended.

        A token below 0 means that none could be drawn: an error ends the sequence. The token of a
        sequence that has finished is dropped; a sequence that was preempted meanwhile keeps its
        token. A silent sequence ends when its keeper wants no more.
        """
        finished = []
        for seq, token_id in tokens:
            if not seq.num_pending_tokens:
                continue
            index = len(seq.token_ids) - seq.num_pending_tokens
            seq.token_ids[index] = token_id
            seq.num_pending_tokens -= 1
            if token_id < 0:
                from nanovllm.engine.schedule.failures import fail

                fail(seq, index)
            elif token_id in seq.stop_token_ids:
                seq.finish("stop", None if token_id in seq.eos_token_ids else token_id)
            elif seq.followers and (end := seq.follow()) is not None:
                if end.reason == "error":
                    seq.token_ids.pop(index)
                seq.finish(*end)
            elif index + 1 >= seq.max_num_tokens:
                seq.finish("length")
            else:
                continue
            finished.append(seq)
        for seq in self.silent_seqs:
            if seq.status is not FINISHED and not seq.parts.keeper.wanted:
                seq.finish("stop")
                finished.append(seq)
        return finished

    @property
    def draws_wait(self) -> bool:
        """Whether a draw or a report depends on tokens in flight, or on their number."""
        doubtful = (seq for seq in self.all_seqs if seq.reads_tokens or seq.num_possible_tokens)
        return any(seq.draw_waits for seq in doubtful)  # most steps have none, and call nothing
