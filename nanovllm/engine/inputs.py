"""From a batch's sequences to the arrays of a step, and from those to tensors on a device.

The arrays are all that a rank must know of a step: they go to the other ranks as they are.
"""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.context import Context

Array = npt.NDArray[Any]
ROOM = 16  # columns, for tables to grow


@dataclass(slots=True)
class StepInputs:
    """T tokens of B sequences, on the host. `Context` says what the fields mean.

    `sample_rows` are the tokens that are sampled from, None for all of them; `shared_rows` which of
    these each sequence takes, if forks share them. Of `prompt_rows` the logits are told.
    `copied_blocks` are pairs, from and to, that are copied when T is computed.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array | None = None  # of a prefill
    cu_seqlens_k: Array | None = None
    context_lens: Array | None = None  # of a decode step
    block_tables: Array | None = None
    sample_rows: Array | None = None
    shared_rows: Array | None = None
    prompt_rows: Array | None = None
    copied_blocks: Array | None = None

    def context(self, device: torch.device) -> Context:
        """The attention metadata, on the device."""
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        return Context(
            is_prefill=q is not None,
            slot_mapping=upload(self.slot_mapping, device),
            cu_seqlens_q=_upload_any(q, device),
            cu_seqlens_k=_upload_any(k, device),
            max_seqlen_q=0 if q is None else int(np.diff(q).max()),
            max_seqlen_k=0 if k is None else int(np.diff(k).max()),
            context_lens=_upload_any(self.context_lens, device),
            block_tables=_upload_any(self.block_tables, device),
        )


class BlockTables:
    """Tables as one matrix. Those of a decode batch differ from the last one's by a few blocks.

    It relies on how sequences keep theirs: a list that grows, and another list when they begin
    anew. The matrix has one more row, of nobody: sequences that were not there begin with that.
    """

    def __init__(self) -> None:
        self._tables: list[list[int]] = []
        self._lengths = [0]
        self._matrix: Array = np.zeros((1, 0), np.int32)

    def of(self, seqs: list[Sequence]) -> Array:
        """The sequences' tables, filled up with block 0, whose keys are hidden there."""
        tables = [seq.block_table for seq in seqs]
        lengths = [*map(len, tables), 0]
        matrix, known = self._matrix, self._lengths
        if len(tables) != len(self._tables) or not all(map(operator.is_, tables, self._tables)):
            places = {id(table): row for row, table in enumerate(self._tables)}
            rows = [*(places.get(id(table), -1) for table in tables), -1]
            matrix, known = matrix[rows], [known[row] for row in rows]
        width = max(lengths)
        if width > matrix.shape[1]:
            matrix = np.pad(matrix, ((0, 0), (0, width + ROOM - matrix.shape[1])))
        self._tables = []  # Ctrl-C may strike before all of it is written
        for row, length in enumerate(lengths):
            if length != known[row]:
                matrix[row, :length] = tables[row]
        self._matrix, self._lengths = matrix, lengths
        self._tables = tables
        whole: Array = matrix[:-1, :width].copy()
        return whole


def prefill_inputs(batch: Batch, block_size: int) -> StepInputs:
    """Each sequence's scheduled tokens, one after the other."""
    seqs = batch.seqs
    token_ids: list[int] = []
    positions, slots, prompt_rows = [], [], []
    sample_rows: list[int] = []
    places: dict[int, int] = {}  # by seq_id: which of them
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    for seq in seqs:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        prompt_rows += [len(token_ids) + row - seq.num_cached_tokens for row in seq.untold_rows]
        token_ids += seq.token_ids[seq.num_cached_tokens : end]
        where = np.arange(seq.num_cached_tokens, end)
        positions.append(where)
        table = np.asarray(seq.block_table)
        slots.append(table[where // block_size] * block_size + where % block_size)
        cu_seqlens_q.append(len(token_ids))
        cu_seqlens_k.append(cu_seqlens_k[-1] + end)
        if seq.samples:
            places[seq.seq_id] = len(sample_rows)
            sample_rows.append(len(token_ids) - 1)
    shared_rows = [*places.values(), *(places[seq.seq_id] for seq, _ in batch.forks)]
    tails = [
        (seq.block_table[-1], follower.block_table[-1])
        for seq, follower in batch.forks
        if seq.num_tokens % block_size
    ]
    cached = any(seq.num_cached_tokens for seq in seqs)
    return StepInputs(
        input_ids=np.array(token_ids, np.int64),
        positions=np.concatenate(positions, dtype=np.int64),
        slot_mapping=np.concatenate(slots, dtype=np.int64),
        cu_seqlens_q=np.array(cu_seqlens_q, np.int32),
        cu_seqlens_k=np.array(cu_seqlens_k, np.int32),
        block_tables=BlockTables().of(seqs) if cached else None,
        sample_rows=np.array(sample_rows, np.int64),
        shared_rows=np.array(shared_rows, np.int64) if batch.forks else None,
        prompt_rows=np.array(prompt_rows, np.int64) if prompt_rows else None,
        copied_blocks=np.array(tails, np.int32).ravel() if tails else None,
    )


def decode_inputs(batch: Batch, block_size: int, block_tables: BlockTables) -> StepInputs:
    """The last token of each sequence; `block_tables` knows the batch before."""
    seqs = batch.seqs
    positions = np.array([seq.num_cached_tokens for seq in seqs], np.int64)
    tables = block_tables.of(seqs)
    blocks = tables[np.arange(len(seqs)), positions // block_size].astype(np.int64)
    return StepInputs(
        input_ids=np.array([seq.token_ids[-1] for seq in seqs], np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        context_lens=(positions + 1).astype(np.int32),
        block_tables=tables,
    )


def warmup_inputs(num_tokens: int, longest: int) -> StepInputs:
    """The largest prefill: `num_tokens` tokens in sequences of `longest`, with nowhere to go."""
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    return StepInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) % longest,
        slot_mapping=np.full(num_tokens, -1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
    )


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it; on the CPU nothing is copied."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def download(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is made when the device gets there; the tensor itself on the CPU."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _upload_any(array: Array | None, device: torch.device) -> torch.Tensor | None:
    return None if array is None else upload(array, device)
