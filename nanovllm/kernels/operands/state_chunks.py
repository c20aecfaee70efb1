"""The chunks into which a prefill step is divided for kernels that compute many tokens at once.

Computed on the host, once a step for all layers.
"""

from typing import Any, NamedTuple

import torch

CHUNK = 64  # the most tokens of a chunk
FEW = 16  # a sequence with at most this many tokens is short: they are computed one by one


class StateChunks(NamedTuple):
    """The chunks of a step, and the sequences' parts that they are of; int32 on the device.

    A chunk ends where a position of its sequence is a multiple of CHUNK, after a token with kept
    states, and with its sequence's part. Kept tokens end KV blocks: with blocks of a multiple of
    CHUNK tokens, results depend on no other sequence of the step. Sequences that are not short come
    first. Rows of the tables have 16 or 32 bytes, as kernels are compiled for aligned addresses.
    Both tables may have rows without tokens, of which kernels compute nothing.
    """

    # [chunks, 4]: the first row, the number of tokens, the sequence, and its first row
    chunks: torch.Tensor
    # [B, 8]: the sequence, its first row, its number of tokens; the first and last + 1 of its
    # chunks, and of its kept rows; 0
    parts: torch.Tensor
    kept: torch.Tensor  # [kept]: the rows with kept states
    num_long: int  # sequences that are not short
    num_long_chunks: int  # their chunks

    @property
    def long(self) -> torch.Tensor:
        """The parts of sequences with many tokens."""
        return self.parts[: self.num_long]

    @property
    def short(self) -> torch.Tensor:
        """The parts of sequences with few tokens."""
        return self.parts[self.num_long :]


class ChunkTables(NamedTuple):
    """The tables of `StateChunks` on the host, in int64."""

    chunks: torch.Tensor
    parts: torch.Tensor
    kept: torch.Tensor
    num_long: int
    num_long_chunks: int


def divide(ends: Any, starts: Any, after: Any, device: torch.device) -> StateChunks:
    """The chunks of sequences on the device, with one upload; `chunk_tables` has the arguments."""
    tables = chunk_tables(ends, starts, after)
    chunks, parts, kept = upload([tables.chunks, tables.parts, tables.kept], device)
    return StateChunks(chunks, parts, kept, tables.num_long, tables.num_long_chunks)


def chunk_tables(ends: Any, starts: Any, after: Any) -> ChunkTables:
    """The chunks of sequences whose tokens are the rows `ends[b]:ends[b + 1]`.

    Arrays on the host: sequence b's first token has position `starts[b]`, or 0 without `starts`;
    states are kept after the tokens with `after` of 0 or more.
    """
    ends = torch.as_tensor(ends, dtype=torch.int64)
    is_kept = torch.as_tensor(after) >= 0
    lengths = ends.diff()
    rows, numbers = torch.arange(int(ends[-1])), torch.arange(len(lengths))
    seqs = numbers.repeat_interleave(lengths)
    positions = rows - ends[seqs] + (0 if starts is None else torch.as_tensor(starts)[seqs])
    is_last = ((positions + 1) % CHUNK == 0) | is_kept
    is_last[ends[1:] - 1] = True
    order = torch.argsort(lengths <= FEW, stable=True)  # of parts
    place = torch.empty_like(order)
    place[order] = numbers
    last, kept = is_last.nonzero().flatten(), is_kept.nonzero().flatten()
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    owners = seqs[first]
    chunks = torch.stack([first, last - first + 1, owners, ends[owners]], dim=1)
    chunks = chunks[torch.argsort(place[owners], stable=True)]
    chunk_ends = _ends(owners.bincount(minlength=len(lengths))[order])
    kept_ends = _ends(seqs[kept].bincount(minlength=len(lengths)))
    parts = torch.stack([
        order, ends[order], lengths[order], chunk_ends[:-1], chunk_ends[1:], kept_ends[order],
        kept_ends[order + 1], torch.zeros_like(order),
    ], dim=1)  # fmt: skip
    num_long = int((lengths > FEW).sum())
    return ChunkTables(chunks, parts, kept, num_long, int(chunk_ends[num_long]))


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """[0, the first count, the sum of the first two, ...]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def upload(tables: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies in int32 that travel to the device together, without a wait."""
    numbers = torch.cat([table.flatten() for table in tables]).int()
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    parts = torch.split(numbers, [table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
