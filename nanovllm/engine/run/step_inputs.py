"""StepInputs: host arrays with all that a rank must know of a step, made from a batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence

MARKS = "marks"  # the array of the marks of a prefill's tokens


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """T tokens of B sequences; `Context` describes the first fields.

    `slot_mapping` has T slots for each cache group, one group after another.

    `table_rows` are the sequences' rows in the device table, and `sample_table_rows` the rows that
    the samples go to. `sampled_tokens` are the tokens to sample after; if forks share one,
    `shared_samples` has the index of each sample's token. `copied_blocks` are pairs (from, to),
    copied after the T tokens are computed.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    table_rows: Array
    sample_table_rows: Array
    sampled_tokens: Array
    shared_samples: Array | None = None
    copied_blocks: Array | None = None

    def tokens_of_samples(self) -> Array:
        """The token that each sample is drawn after."""
        if self.shared_samples is None:
            return self.sampled_tokens
        tokens: Array = self.sampled_tokens[self.shared_samples]
        return tokens

    def pending(self) -> tuple[Array, Array]:
        """The tokens that are in flight, and the table rows that will hold them."""
        tokens = np.flatnonzero(self.input_ids == PENDING)
        return tokens, self.table_rows[np.searchsorted(self.cu_seqlens_q, tokens, side="right") - 1]


@dataclass(slots=True)
class StepInputs:
    """A step on the host: the changes of the device table, a prefill's tokens, arrays of parts.

    A decode step of `num_seqs` sequences reads everything else from the table: for each of them
    `num_queries` tokens, the last one and guessed ones. `width` is the number of columns of its
    block tables, 0 for a prefill that reads none. `whole_logits`: whether rank 0 needs the logits
    of a decode step, and not only the tokens that the ranks draw together. `keeps_hidden`: whether
    rank 0 needs the hidden states that tokens are drawn from, which decode graphs do not keep.
    `is_marked`: whether some sequences have marks. If a step `catches_up`, only the device's
    drafting computes the prefill's tokens. `arrays` has the arrays of step parts, by name.
    """

    num_seqs: int
    width: int
    changes: TableChanges
    prefill: PrefillInputs | None = None
    num_queries: int = 1
    whole_logits: bool = True
    is_marked: bool = False
    catches_up: bool = False
    keeps_hidden: bool = False
    arrays: dict[str, Array] = field(default_factory=dict)


def step_inputs(
    batch: Batch, block_size: int, ledger: Ledger, whole_logits: bool = True
) -> StepInputs:
    """Make the inputs of a batch's step; the ledger records their changes as sent."""
    if batch.is_prefill or (batch.drafts and not batch.num_drafts):
        return _prefill_inputs(batch, block_size, ledger)
    width, changes = ledger.decode(batch.seqs, batch.num_drafts)
    return StepInputs(
        len(batch.seqs), width, changes, None, 1 + batch.num_drafts, whole_logits, ledger.is_marked
    )


def _prefill_inputs(batch: Batch, block_size: int, ledger: Ledger) -> StepInputs:
    seqs = batch.seqs
    assert not any(seq.num_pending_tokens for seq in seqs[batch.num_decodes :])
    table_rows, sample_table_rows, width, changes = ledger.prefill(
        batch.all_seqs, batch.sampling_seqs, batch.drafts
    )
    starts = [seq.num_cached_tokens for seq in seqs]
    ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
    tokens = token_arrays(seqs, starts, ends, block_size, ledger.layout.block_parts, batch.drafts)
    sampled, shared = _samples(batch, q_ends=tokens[3])
    prefill = PrefillInputs(
        *tokens,
        table_rows=table_rows[: len(seqs)],
        sample_table_rows=sample_table_rows,
        sampled_tokens=sampled,
        shared_samples=shared,
        copied_blocks=_copied_blocks(batch, block_size),
    )
    if not any(starts):
        width = 0
    inputs = StepInputs(len(seqs), width, changes, prefill, is_marked=ledger.is_marked)
    if inputs.is_marked:
        inputs.arrays[MARKS] = np.repeat(ledger.marks_of(seqs), np.diff(tokens[3]))
    return inputs


def token_arrays(
    seqs: list[Sequence],
    starts: list[int],
    ends: list[int],
    block_size: int,
    block_parts: tuple[int, ...] = (1,),
    drafts: Mapping[Sequence, list[int]] = {},
) -> tuple[Array, Array, Array, Array, Array]:
    """Ids, positions and slots of tokens and then drafts; where queries and keys end.

    There are slots for each of the `block_parts`, the factors of the cache groups' block numbers.
    """
    token_ids: list[int] = []
    positions: list[Array] = []
    slots: list[list[Array]] = [[] for _ in block_parts]
    q_ends, k_ends = [0], [0]
    for seq, start, end in zip(seqs, starts, ends, strict=True):
        token_ids += seq.token_ids[start:end]
        if guessed := drafts.get(seq):
            token_ids += guessed
            end += len(guessed)
        where = np.arange(start, end)
        positions.append(where)
        for of_group, table, part in zip(slots, seq.block_tables, block_parts, strict=False):
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
    """Concatenate these arrays, or none."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _samples(batch: Batch, q_ends: Array) -> tuple[Array, Array | None]:
    """The tokens to sample after; if there are forks, also the index of each sample's token."""
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


def _copied_blocks(batch: Batch, block_size: int) -> Array | None:
    """The last blocks that forks copy, because they are not full."""
    tails = [
        (table[-1], other[-1])
        for seq, sibling in batch.forks
        if seq.num_tokens % block_size
        for table, other in zip(seq.block_tables, sibling.block_tables, strict=True)
    ]
    return np.array(tails, np.int32).ravel() if tails else None
