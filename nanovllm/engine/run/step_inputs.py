"""StepInputs: from a batch's sequences to host arrays with all that a rank must know of a step."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.ledger import Ledger, adapter_slot
from nanovllm.engine.run.reports import Report, ReportInputs, prompt_report_inputs
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.batch import NO_COPIES, Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence

KeptTokens = Callable[[Array], Array]  # from where queries end to tokens


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """T tokens of B sequences; `Context` describes the first fields.

    `slot_mapping` has T slots for each cache group, one group after another.

    `table_rows` are the sequences' rows in the device table, and `sample_table_rows` those that the
    samples go to. `sampled_tokens` are the tokens to sample from, None for all; where forks share
    them, `shared_samples` says which of them each sample takes. `reported_tokens` are the tokens
    whose logits are reported, and `kept_tokens` those whose hidden states are kept.
    `copied_blocks` are pairs (from, to), copied after the T tokens are computed. `next_tokens` are
    those after the sequences' last ones, 0 where they are not known; None if nothing reads them.
    `adapter_slots` [T] are the slots of the tokens' adapters; None if there are no adapters.
    `states_before` [B] and `states_after` [T] are the slots of a `StateStep`; None without states.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    table_rows: Array
    sample_table_rows: Array
    sampled_tokens: Array | None = None
    shared_samples: Array | None = None
    reported_tokens: Array | None = None
    copied_blocks: Array | None = None
    next_tokens: Array | None = None
    kept_tokens: Array | None = None
    adapter_slots: Array | None = None
    states_before: Array | None = None
    states_after: Array | None = None

    @property
    def num_reported(self) -> int:
        """How many tokens' logits are reported."""
        return 0 if self.reported_tokens is None else len(self.reported_tokens)

    @property
    def num_kept(self) -> int:
        """How many tokens' hidden states are kept."""
        return 0 if self.kept_tokens is None else len(self.kept_tokens)

    def needed_tokens(self) -> Array | None:
        """The tokens whose hidden states are used: kept, reported, sampled ones; None for all."""
        first = [part for part in (self.kept_tokens, self.reported_tokens) if part is not None]
        if self.sampled_tokens is None or not first:
            return self.sampled_tokens
        return np.concatenate([*first, self.sampled_tokens])

    def sample_slots(self) -> Array | None:
        """The slots of the samples' adapters; None if there are no adapters."""
        slots = _at(self.adapter_slots, self.sampled_tokens)
        return slots if self.shared_samples is None else _at(slots, self.shared_samples)

    def reported_slots(self) -> Array | None:
        """The slots of the reported tokens' adapters; None if there are no adapters."""
        return _at(self.adapter_slots, self.reported_tokens)

    def pending(self) -> tuple[Array, Array]:
        """The tokens that are in flight, and the table rows that will hold them."""
        tokens = np.flatnonzero(self.input_ids == PENDING)
        return tokens, self.table_rows[np.searchsorted(self.cu_seqlens_q, tokens, side="right") - 1]


def _at(slots: Array | None, tokens: Array | None) -> Array | None:
    return slots if slots is None or tokens is None else slots[tokens]


@dataclass(slots=True)
class StepInputs:
    """A step on the host: the changes of the device table, and a prefill's tokens.

    A decode step of `num_seqs` sequences reads everything else from the table: for each of them
    `num_queries` tokens, the last one and drafts. `width` is the number of columns of its block
    tables, 0 for a prefill that reads none. `whole_logits`: whether rank 0 needs the logits of a
    decode step, and not only the tokens that the ranks draw together. `keeps_hidden`: whether it
    needs the hidden states that tokens are drawn from, which decode graphs do not leave. If a
    decode step `adapts`, some of its sequences have adapters. `copied_before` and `copied_after`
    are pairs (from, to) of state slots that are copied before and after the step. If it
    `catches_up`, the draft model computes the prefill's tokens, and nothing else is done. Rank 0
    alone has `report`, which says what is reported of the prompts.
    """

    num_seqs: int
    width: int
    changes: TableChanges
    prefill: PrefillInputs | None = None
    num_queries: int = 1
    whole_logits: bool = True
    adapts: bool = False
    report: ReportInputs | None = None
    catches_up: bool = False
    keeps_hidden: bool = False
    copied_before: Array | None = None
    copied_after: Array | None = None


def step_inputs(
    batch: Batch,
    block_size: int,
    ledger: Ledger,
    prompt_reports: list[Report],
    whole_logits: bool = True,
    kept_tokens: KeptTokens | None = None,
) -> StepInputs:
    """The inputs of a batch's step; the ledger counts its changes as sent."""
    if not batch.is_prefill and (batch.num_drafts or not batch.drafts):
        width, changes = ledger.decode(batch.seqs, batch.num_drafts)
        inputs = StepInputs(
            len(batch.seqs), width, changes, None, 1 + batch.num_drafts, whole_logits,
            ledger.adapts,
        )  # fmt: skip
    else:
        inputs = _prefill_inputs(batch, block_size, ledger, prompt_reports, kept_tokens)
    if batch.copies is not NO_COPIES:
        inputs.copied_before, inputs.copied_after = map(_pairs, batch.copies)
    return inputs


def _prefill_inputs(
    batch: Batch,
    block_size: int,
    ledger: Ledger,
    prompt_reports: list[Report],
    kept_tokens: KeptTokens | None,
) -> StepInputs:
    seqs = batch.seqs
    assert not any(seq.num_pending_tokens for seq in seqs[batch.num_decodes :])
    table_rows, sample_table_rows, width, changes = ledger.prefill(
        batch.all_seqs, batch.sampling_seqs, batch.drafts
    )
    starts = [seq.num_cached_tokens for seq in seqs]
    ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
    parts = ledger.layout.parts
    tokens = token_arrays(seqs, starts, ends, block_size, parts, batch.drafts)
    sampled, shared = _samples(batch, q_ends=tokens[3])
    prefill = PrefillInputs(
        *tokens,
        table_rows=table_rows[: len(seqs)],
        sample_table_rows=sample_table_rows,
        sampled_tokens=sampled,
        shared_samples=shared,
        reported_tokens=_reported_tokens(seqs, q_ends=tokens[3]),
        copied_blocks=_copied_blocks(batch, block_size),
        next_tokens=_next_tokens(seqs, ends) if ledger.layout.most_drafts else None,
        kept_tokens=kept_tokens(tokens[3]) if kept_tokens else None,
        adapter_slots=_adapter_slots(seqs, tokens[3]) if ledger.adapts else None,
        **states_before_and_after(batch, tokens[3]) if ledger.layout.num_state_slots else {},
    )
    if not any(seq.num_cached_tokens for seq in seqs):
        width = 0
    report = prompt_report_inputs(prompt_reports)
    return StepInputs(len(seqs), width, changes, prefill, report=report)


def token_arrays(
    seqs: list[Sequence],
    starts: list[int],
    ends: list[int],
    block_size: int,
    parts: tuple[int, ...] = (1,),
    drafts: Mapping[Sequence, list[int]] = {},
) -> tuple[Array, Array, Array, Array, Array]:
    """Ids, positions and slots of tokens and then drafts; where queries and keys end.

    Slots are those of the first cache groups, whose block numbers are multiplied by `parts`.
    """
    token_ids: list[int] = []
    positions: list[Array] = []
    slots: list[list[Array]] = [[] for _ in parts]
    q_ends, k_ends = [0], [0]
    for seq, start, end in zip(seqs, starts, ends, strict=True):
        token_ids += seq.token_ids[start:end]
        if guessed := drafts.get(seq):
            token_ids += guessed
            end += len(guessed)
        where = np.arange(start, end)
        positions.append(where)
        for of_group, table, part in zip(slots, seq.block_tables, parts, strict=False):
            blocks = np.asarray(table)[where // block_size] * part
            of_group.append(blocks * block_size + where % block_size)
        q_ends.append(len(token_ids))
        k_ends.append(k_ends[-1] + end)
    return (
        np.array(token_ids, np.int64),
        np.concatenate(positions, dtype=np.int64),
        _joined(part for of_group in slots for part in of_group),
        np.array(q_ends, np.int32),
        np.array(k_ends, np.int32),
    )


def _joined(parts: Iterable[Array]) -> Array:
    """One array of these, of which there may be none."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _samples(batch: Batch, q_ends: Array) -> tuple[Array, Array | None]:
    """The tokens to sample from, and which of them each sample takes, if there are forks."""
    sampled: list[int] = []
    index_of: dict[int, int] = {}  # in `sampled`, by seq_id
    for seq, end in zip(batch.seqs, q_ends[1:].tolist(), strict=True):
        if seq.samples:
            index_of[seq.seq_id] = len(sampled)
            sampled += range(end - 1 - len(batch.drafts.get(seq, ())), end)
    if not batch.forks:
        return np.array(sampled, np.int64), None
    shared = [*range(len(sampled)), *(index_of[seq.seq_id] for seq, _ in batch.forks)]
    return np.array(sampled, np.int64), np.array(shared, np.int64)


def _reported_tokens(seqs: list[Sequence], q_ends: Array) -> Array | None:
    """The tokens whose logits are reported; None if there are none."""
    starts = q_ends.tolist()
    reported = [
        start + index - seq.num_cached_tokens
        for seq, start in zip(seqs, starts, strict=False)
        for index in seq.unreported_indices
    ]
    return np.array(reported, np.int64) if reported else None


def _next_tokens(seqs: list[Sequence], ends: list[int]) -> Array:
    """The token after each sequence's scheduled ones; 0 where a prompt ends."""
    known = (
        seq.token_ids[end] if end < len(seq.token_ids) else 0
        for seq, end in zip(seqs, ends, strict=True)
    )  # fmt: skip
    return np.fromiter(known, np.int64, len(seqs))


def _adapter_slots(seqs: list[Sequence], q_ends: Array) -> Array:
    """The slots of the tokens' adapters."""
    slots = np.fromiter(map(adapter_slot, seqs), np.int32, len(seqs))
    return np.repeat(slots, np.diff(q_ends))


def _copied_blocks(batch: Batch, block_size: int) -> Array | None:
    """The last blocks that forks copy, because they are not full."""
    tails = [
        (table[-1], other[-1])
        for seq, sibling in batch.forks
        if seq.num_tokens % block_size
        for table, other in zip(seq.block_tables, sibling.block_tables, strict=True)
    ]
    return np.array(tails, np.int32).ravel() if tails else None


def states_before_and_after(batch: Batch, q_ends: Array) -> dict[str, Array]:
    """The slots in which a prefill finds states, and leaves them.

    It leaves the states after a prompt's last token here and after its checkpoints, and in a
    sequence with drafts those after each token.
    """
    before = np.zeros(len(batch.seqs), np.int64)
    after = np.full(int(q_ends[-1]), -1, np.int64)
    for index, (seq, q_end) in enumerate(zip(batch.seqs, q_ends[1:].tolist(), strict=True)):
        own, start, num_own = seq.state_slots, seq.num_cached_tokens, len(seq.state_slots)
        if start:
            before[index] = own[(start - 1) % num_own]
        end = start + seq.num_scheduled_tokens + len(batch.drafts.get(seq, ()))
        first = start + seq.num_scheduled_tokens - 1  # of the tokens whose states are kept
        for position in range(first, end):
            after[q_end - end + position] = own[position % num_own]
        for length, slot in seq.checkpoints.items():
            if start < length <= first:
                after[q_end - end + length - 1] = slot
    return {"states_before": before, "states_after": after}


def _pairs(copies: list[tuple[int, int]]) -> Array | None:
    return np.array(copies, np.int32).ravel() if copies else None
