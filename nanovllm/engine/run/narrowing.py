"""Makes the filters of narrowed samples of a step. Loaded when a request first has some."""

import functools
from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.run.filters.biases import biases
from nanovllm.engine.run.filters.entries import Row, column_of
from nanovllm.engine.run.filters.listed import (
    allowed_ids,
    allowed_of,
    forbidden_ids,
    forbidden_of,
)
from nanovllm.engine.run.filters.penalties import penalties
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.operands.cuts import Cuts, are_few
from nanovllm.layers.filters import Change, Filters
from nanovllm.sampling_params import SamplingParams

NARROWED_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 26}  # the most that are copied in float32 at a time
UNCUT = False, False, False, False  # what `_kind` returns without cuts

# What makes the changes of narrowed rows, out of R rows, in the order in which they apply.
CHANGES: tuple[Callable[[list[Row], int], Change | None], ...] = (
    allowed_ids, forbidden_ids, biases, penalties,
)  # fmt: skip
NOT_IN_MASKS = CHANGES[2:]  # a constraint's masks have the lists, too

Draw = tuple[Sequence, list[int]]  # a sequence, and the tokens assumed before the drawn one


def filters_of(
    rows: list[int], draws: list[Draw], vocab_size: int, device_type: str
) -> list[Filters]:
    """The filters of narrowed rows. Rows with the same kinds of filters are in one part.

    A row gets no token if its own filters cannot be made.
    """

    def make(rows: list[int], draws: list[Draw]) -> list[Filters]:
        return _filters_of(rows, draws, vocab_size, device_type)

    try:
        return make(rows, draws)
    except BaseException as error:
        from nanovllm.engine.run.failed_draws import filters_despite

        return filters_despite(error, make, rows, draws, vocab_size)


def _filters_of(
    rows: list[int], draws: list[Draw], vocab_size: int, device_type: str
) -> list[Filters]:
    if all(seq.parts.constraint is not None and not seq.has_filters for seq, _ in draws):
        return [_filters(rows, draws, vocab_size, device_type)]  # masks alone copy nothing
    alike: dict[tuple[bool, ...], tuple[list[int], list[Draw]]] = {}
    for row, draw in zip(rows, draws, strict=True):
        seq = draw[0]
        kind = _kind(seq.params, vocab_size) if seq.has_filters else UNCUT
        wide = (seq.parts.constraint is not None, seq.parts.processors is not None)
        some_rows, some = alike.setdefault((*wide, *kind), ([], []))
        some_rows.append(row)
        some.append(draw)
    size = rows_narrowed_together(vocab_size, device_type)
    parts = [
        (some_rows[start : start + size], some[start : start + size])
        for some_rows, some in alike.values()
        for start in range(0, len(some_rows), size)
    ]
    return [_filters(*part, vocab_size, device_type) for part in parts]


def rows_narrowed_together(vocab_size: int, device_type: str) -> int:
    """The most rows in one part."""
    return max(1, NARROWED_LOGITS[device_type] // vocab_size)


def _filters(rows: list[int], draws: list[Draw], vocab_size: int, device_type: str) -> Filters:
    filters = Filters(torch.from_numpy(np.fromiter(rows, np.int64, len(rows))))
    if draws[0][0].parts.processors is not None:
        filters.processors = [
            (row, functools.partial(seq.parts.processors.apply, seq, assumed))
            for row, (seq, assumed) in enumerate(draws)
        ]
    listed = [  # most rows with a constraint have no other filter
        (row, seq, assumed)
        for row, (seq, assumed) in enumerate(draws)
        if seq.has_filters or len(seq.token_ids) < seq.min_num_tokens
    ]
    changes = CHANGES
    if (constraint := draws[0][0].parts.constraint) is not None:
        lists = allowed_of(listed), forbidden_of(listed)
        pinned = device_type == "cuda"
        filters.masks = constraint.masks_of(draws, *lists, pinned)
        changes = NOT_IN_MASKS
    made = [make(listed, len(draws)) for make in changes] if listed else []
    filters.changes = tuple(change for change in made if change is not None)
    if draws[0][0].params.cuts:
        filters.cuts = _cuts([seq.params for seq, _ in draws], vocab_size)
    return filters


def _kind(params: SamplingParams, vocab_size: int) -> tuple[bool, ...]:
    """How a row is drawn: whether with cuts, from candidates, from few candidates, with top_k."""
    cuts = params.cuts
    has_k = cuts and 0 < params.top_k < vocab_size
    few = has_k and are_few(params.top_k, vocab_size)
    return cuts, few or (has_k and params.top_p < 1), few, has_k


def _cuts(params: list[SamplingParams], vocab_size: int) -> Cuts:
    cuts = Cuts()
    if any(p.min_p > 0 for p in params):
        cuts.min_p = column_of(p.min_p for p in params)
    if any(p.top_p < 1 for p in params):
        cuts.top_p = column_of(p.top_p for p in params)
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    if min(top_k) < vocab_size:
        cuts.top_k = torch.from_numpy(np.array(top_k))[:, None]
    if _kind(params[0], vocab_size)[1]:
        cuts.num_candidates = max(top_k)
    return cuts
