"""The slots of states in captured prefills of one size, and their chunks, padded."""

import functools
from typing import NamedTuple

import torch

from nanovllm.engine.run.padded import Fill, PrefillSize, aligned
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.transfer import Array
from nanovllm.kernels.operands.state_chunks import (
    CHUNK,
    FEW,
    ChunkTables,
    StateChunks,
    chunk_tables,
)
from nanovllm.kernels.operands.state_step import StateStep


class _Arrays(NamedTuple):
    before: torch.Tensor  # [S]
    after: torch.Tensor  # [T]
    ends: torch.Tensor  # [S + 1]
    chunks: torch.Tensor  # [C, 4], int32
    parts: torch.Tensor  # [L + S, 8], int32: those of L long sequences, then those of short ones
    kept: torch.Tensor  # [T], int32


class PaddedStates:
    """The arrays of a step with states. Unused chunks and parts have no tokens."""

    def __init__(self, size: PrefillSize) -> None:
        self.size = size
        # A sequence has up to two chunks more than it fills, and some for kept states within it.
        self.num_long = min(size.num_seqs, size.num_tokens // (FEW + 1) + 1)
        self.num_long_chunks = size.num_tokens // CHUNK + 2 * self.num_long
        self._num_chunks = self.num_long_chunks + 2 * size.num_seqs
        tokens, seqs, _ = size
        num_parts = self.num_long + seqs
        self._lengths = [
            aligned(seqs), tokens, aligned(seqs + 1), 2 * self._num_chunks, 4 * num_parts,
            tokens // 2,
        ]  # fmt: skip
        self.words = sum(self._lengths)

    def filler(self, inputs: StepInputs) -> Fill | None:
        """What writes a step's slots and chunks; None if these do not fit."""
        assert inputs.prefill is not None
        arrays = inputs.arrays
        tables = chunk_tables(
            inputs.prefill.cu_seqlens_q, arrays["states_starts"], arrays["states_after"]
        )
        num_short = len(tables.chunks) - tables.num_long_chunks
        if tables.num_long_chunks > self.num_long_chunks or num_short > 2 * self.size.num_seqs:
            return None
        return functools.partial(self._fill, inputs, tables)

    def _fill(self, inputs: StepInputs, tables: ChunkTables, words: Array) -> None:
        assert inputs.prefill is not None
        own = self._parts(torch.from_numpy(words))
        for tensor, array, padding in (
            (own.before, inputs.arrays["states_before"], 0),
            (own.after, inputs.arrays["states_after"], -1),
            (own.ends, inputs.prefill.cu_seqlens_q, len(inputs.prefill.input_ids)),
        ):
            tensor[: len(array)] = torch.from_numpy(array)
            tensor[len(array) :] = padding
        own.chunks.zero_()
        own.parts.zero_()
        long, short = tables.num_long_chunks, len(tables.chunks) - tables.num_long_chunks
        own.chunks[:long] = tables.chunks[:long]
        own.chunks[self.num_long_chunks :][:short] = tables.chunks[long:]
        of_long, of_short = tables.parts[: tables.num_long], tables.parts[tables.num_long :]
        own.parts[: len(of_long)] = of_long
        own.parts[self.num_long :][: len(of_short)] = of_short
        own.kept[: len(tables.kept)] = tables.kept

    def read(self, words: torch.Tensor) -> StateStep:
        """Where the rows find and leave states."""
        own = self._parts(words)
        chunks = StateChunks(own.chunks, own.parts, own.kept, self.num_long, self.num_long_chunks)
        # Plain kernels read the ends on the host, and are not captured.
        ends = own.ends.numpy() if words.device.type == "cpu" else ()
        step = StateStep(own.before, own.after, ends, is_padded=True)
        step.use_chunks(chunks)
        return step

    def _parts(self, words: torch.Tensor) -> _Arrays:
        before, after, ends, *tables = torch.split(words, self._lengths)
        chunks, parts, kept = (table.view(torch.int32) for table in tables)
        seqs = self.size.num_seqs
        before, ends = before[:seqs], ends[: seqs + 1]
        return _Arrays(before, after, ends, chunks.view(-1, 4), parts.view(-1, 8), kept)
