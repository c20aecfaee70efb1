"""Masks: bitmaps of the tokens that the constraints of a step's rows allow."""

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.run.filters.entries import IdsOfRows
from nanovllm.engine.schedule.parts import End
from nanovllm.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORD = 32  # bits
ALONE = 4  # up to this many matchers, one thread is faster than several

Jobs = list[tuple["LLMatcher", int]]  # matchers, each with its row


class Masked(Protocol):
    """The part of a constraint from which masks are made."""

    excluded: tuple[int, ...]
    num_words: int
    num_tokens: int
    num_followed: int

    @property
    def long(self) -> object | None: ...
    @property
    def failure(self) -> str: ...
    @property
    def matcher(self) -> "LLMatcher": ...
    @property
    def free(self) -> object | None: ...
    def after(self, drafts: list[int]) -> "LLMatcher | None": ...
    def sole(self, drafts: list[int]) -> int | None: ...
    def barred(self, drafts: list[int]) -> tuple[int, ...]: ...
    def update(self, seq: Sequence) -> End | None: ...


def masks_of(
    draws: list[tuple[Sequence, list[int]]],
    allowed: IdsOfRows,
    forbidden: IdsOfRows,
    pinned: bool,
) -> torch.Tensor:
    """The bitmaps of the tokens that are allowed after each sequence's drafts.

    All sequences have constraints. `allowed` and `forbidden` are token lists of their other
    parameters. Where these leave no token, none is drawn.
    """
    asked = []
    for seq, drafts in draws:
        constraint = seq.parts.constraint
        if constraint.num_followed != len(seq.token_ids) or seq.num_pending_tokens:
            constraint.update(seq)
        asked.append((constraint, drafts))
    masks = Masks(asked, pinned)
    for row in masks.fill():
        seq, drafts = draws[row]
        seq.parts.errors[len(seq.token_ids) + len(drafts)] = seq.parts.constraint.failure
    for row, ids in allowed:
        masks.keep_only(row, ids)
    masks.forbid(forbidden)
    return masks.tensor


class Masks:
    """The bitmaps [n, W] of the tokens that each constraint allows after its drafts.

    Bit i % 32 of word i // 32 is set if token i is allowed. W is the constraints' `num_words`.
    """

    def __init__(self, asked: list[tuple[Masked, list[int]]], pinned: bool = False) -> None:
        self._asked = asked
        shape = len(asked), asked[0][0].num_words
        self.tensor = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()

    def fill(self) -> set[int]:
        """Write all rows. Returns the rows that have failed, which allow nothing."""
        sole = self._sole()
        jobs, free = self._jobs(sole)
        # A sequence with fewer drafts repeats rows. Only one thread may use each matcher.
        if len(dict(jobs)) < len(jobs):
            jobs = [(matcher.deep_copy(), row) for matcher, row in jobs]
        address, stride = self.tensor.data_ptr(), self.array.strides[0]
        if len(jobs) > ALONE:
            _executor().unsafe_compute_mask_ptr(jobs, address, stride, len(self._asked))
        else:
            for matcher, row in jobs:
                matcher.unsafe_compute_mask_ptr(address + row * stride, stride)
        failed = {row for matcher, row in jobs if matcher.is_error()}
        for row in failed:  # where the text cannot continue, llguidance lets it end
            self.array[row] = 0
        for row, token_id in sole.items():
            self.array[row] = 0
            self.allow_one(row, token_id)
        self._bar(free)
        return failed

    def _sole(self) -> dict[int, int]:
        """The only tokens of rows in which a long text is forced."""
        found = {
            row: constraint.sole(drafts)
            for row, (constraint, drafts) in enumerate(self._asked)
            if constraint.long is not None
        }
        return {row: token_id for row, token_id in found.items() if token_id is not None}

    def _jobs(self, sole: Collection[int]) -> tuple[Jobs, list[int]]:
        """The matchers with their rows, and the rows in which all tokens are allowed."""
        jobs = [
            (constraint.matcher, row)
            for row, (constraint, drafts) in enumerate(self._asked)
            if not drafts and constraint.free is None
        ]
        if len(jobs) == len(self._asked) and not sole:  # the usual case
            return jobs, []
        rows = [row for row in range(len(self._asked)) if row not in sole]
        matchers = {row: self._asked[row][0].after(self._asked[row][1]) for row in rows}
        jobs = [(matcher, row) for row, matcher in matchers.items() if matcher is not None]
        return jobs, [row for row, matcher in matchers.items() if matcher is None]

    def _bar(self, free: list[int]) -> None:
        """Clear the forbidden tokens that matchers, or the `free` rows, allow."""
        without = [constraint.excluded for constraint, _ in self._asked]
        for row in free:
            constraint, drafts = self._asked[row]
            without[row] = constraint.barred(drafts)
            self.array[row] = -1
        bits, kinds = self.array.view(np.uint32), {*without}
        for ids in kinds:
            rows: slice | list[int] = slice(None)
            if len(kinds) > 1 and ids:
                rows = [row for row, others in enumerate(without) if others == ids]
            for token_id in ids:
                bits[rows, token_id // WORD] &= ~np.uint32(1 << token_id % WORD)

    def forbid(self, ids_of_rows: Iterable[tuple[int, Collection[int]]]) -> None:
        """Clear the bits of tokens of some rows."""
        _forbid(self.array, ids_of_rows)

    def keep_only(self, row: int, ids: Collection[int]) -> None:
        """Clear the bits of all other tokens in a row."""
        kept = np.full((1, self.array.shape[1]), -1, np.int32)
        _forbid(kept, [(0, ids)])
        self.array[row] &= ~kept[0]

    def allow_one(self, row: int, token_id: int) -> None:
        """Allow a token."""
        self.array.view(np.uint32)[row, token_id // WORD] |= np.uint32(1 << token_id % WORD)


def _forbid(
    masks: npt.NDArray[np.int32], ids_of_rows: Iterable[tuple[int, Collection[int]]]
) -> None:
    listed = [(row, ids) for row, ids in ids_of_rows if len(ids)]
    if listed:
        row_numbers, lists = zip(*listed, strict=True)
        rows = np.repeat(np.array(row_numbers), [*map(len, lists)])
        ids = np.concatenate([np.asarray(ids, np.int64) for ids in lists])
        bits = np.uint32(1) << (ids % WORD).astype(np.uint32)
        np.bitwise_and.at(masks.view(np.uint32), (rows, ids // WORD), ~bits)


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
