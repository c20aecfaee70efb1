"""From a batch's sequences to the tensors of a step: token ids, positions, attention metadata."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.context import Context


@dataclass(slots=True)
class StepInputs:
    """T tokens; `sample_rows` are the rows that are sampled from, None for all of them."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sample_rows: torch.Tensor | None


def prefill_inputs(seqs: list[Sequence], block_size: int, device: torch.device) -> StepInputs:
    """Each sequence's scheduled tokens, one after the other."""
    token_ids: list[int] = []
    positions, slots, sample_rows = [], [], []
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    for seq in seqs:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        token_ids += seq.token_ids[seq.num_cached_tokens : end]
        where = np.arange(seq.num_cached_tokens, end)
        positions.append(where)
        table = np.asarray(seq.block_table)
        slots.append(table[where // block_size] * block_size + where % block_size)
        cu_seqlens_q.append(len(token_ids))
        cu_seqlens_k.append(cu_seqlens_k[-1] + end)
        if seq.samples:
            sample_rows.append(len(token_ids) - 1)
    cached = any(seq.num_cached_tokens for seq in seqs)
    context = Context(
        is_prefill=True,
        slot_mapping=upload(np.concatenate(slots), np.int64, device),
        cu_seqlens_q=upload(cu_seqlens_q, np.int32, device),
        cu_seqlens_k=upload(cu_seqlens_k, np.int32, device),
        max_seqlen_q=max(seq.num_scheduled_tokens for seq in seqs),
        max_seqlen_k=max(seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs),
        block_tables=_block_tables(seqs, device) if cached else None,
    )
    return StepInputs(
        upload(token_ids, np.int64, device),
        upload(np.concatenate(positions), np.int64, device),
        context,
        upload(sample_rows, np.int64, device),
    )


def decode_inputs(seqs: list[Sequence], block_size: int, device: torch.device) -> StepInputs:
    """The last token of each sequence."""
    positions = np.array([seq.num_cached_tokens for seq in seqs], dtype=np.int64)
    blocks = np.array([seq.block_table[seq.num_cached_tokens // block_size] for seq in seqs])
    context = Context(
        is_prefill=False,
        slot_mapping=upload(blocks * block_size + positions % block_size, np.int64, device),
        context_lens=upload(positions + 1, np.int32, device),
        block_tables=_block_tables(seqs, device),
    )
    token_ids = [seq.token_ids[-1] for seq in seqs]
    return StepInputs(
        upload(token_ids, np.int64, device), upload(positions, np.int64, device), context, None
    )


def warmup_inputs(num_tokens: int, longest: int, device: torch.device) -> StepInputs:
    """The largest prefill: `num_tokens` tokens in sequences of `longest`, with nowhere to go."""
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens)
    context = Context(
        is_prefill=True,
        slot_mapping=upload(np.full(num_tokens, -1), np.int64, device),
        cu_seqlens_q=upload(starts, np.int32, device),
        cu_seqlens_k=upload(starts, np.int32, device),
        max_seqlen_q=min(longest, num_tokens),
        max_seqlen_k=min(longest, num_tokens),
    )
    return StepInputs(
        upload(np.zeros(num_tokens), np.int64, device),
        upload(np.arange(num_tokens) % longest, np.int64, device),
        context,
        None,
    )


def _block_tables(seqs: list[Sequence], device: torch.device) -> torch.Tensor:
    """The sequences' tables as one matrix, filled up with block 0, which is never read there."""
    tables = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), dtype=np.int32)
    for row, seq in zip(tables, seqs, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return upload(tables, np.int32, device)


def upload(values: Any, dtype: type, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it; on the CPU nothing is copied."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
