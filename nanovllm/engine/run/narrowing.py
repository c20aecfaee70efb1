"""Makes the filters of narrowed samples of a step. Loaded when a request first has some."""

import functools
from collections.abc import Iterable

import numpy as np
import torch

from nanovllm.engine.run.entries import allowed_entries, biased_entries, forbidden_entries
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.operands.cuts import Cuts, are_few
from nanovllm.layers.filters import Filters, Penalties
from nanovllm.sampling_params import SamplingParams

NARROWED_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 26}  # the most that are copied in float32 at a time
UNCUT = False, False, False, False  # what `_kind` returns without cuts

Draw = tuple[Sequence, list[int]]  # a sequence, and the tokens assumed before the drawn one


def filters_of(
    rows: list[int], draws: list[Draw], vocab_size: int, device_type: str
) -> list[Filters]:
    """The filters of narrowed rows. Rows with the same kinds of filters are in one part."""
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
    allowed = [(row, ids) for row, seq, _ in listed if (ids := seq.params.allowed_token_ids)]
    forbidden = [
        (row, ids)
        for row, seq, assumed in listed
        if may_forbid(seq) and (ids := _forbidden(seq, assumed))
    ]
    if (constraint := draws[0][0].parts.constraint) is not None:
        pinned = device_type == "cuda"
        filters.masks = constraint.masks_of(draws, allowed, forbidden, vocab_size, pinned)
    else:
        if allowed:
            filters.allowed = allowed_entries([(row, draws[row][0].params) for row, _ in allowed])
        if forbidden:
            filters.forbidden = forbidden_entries(forbidden)
    biased = [(row, seq.params) for row, seq, _ in listed if seq.params.logit_bias]
    if biased:
        filters.biases = biased_entries(biased)
    if any(seq.params.penalizes for _, seq, _ in listed):
        filters.penalties = _penalties(draws)
    if draws[0][0].params.cuts:
        filters.cuts = _cuts([seq.params for seq, _ in draws], vocab_size)
    return filters


def may_forbid(seq: Sequence) -> bool:
    """Whether `forbidden_token_ids` may return tokens; otherwise it need not be called."""
    return bool(seq.parts.bad_words) or len(seq.token_ids) < seq.min_num_tokens


def forbidden_token_ids(seq: Sequence, assumed: list[int]) -> set[int]:
    """The tokens that may not come after the `assumed` ones, or next if there are none.

    They are the last tokens of bad words, and all stop tokens before `min_tokens`. Bad words are
    looked for in the output alone, not in the prompt.
    """
    num_tokens, bad_words = len(seq.token_ids) + len(assumed), seq.parts.bad_words
    forbidden = set(seq.stop_token_ids) if num_tokens < seq.min_num_tokens else set()
    if not bad_words:
        return forbidden
    start = len(seq.token_ids) - max(map(len, bad_words))
    output = seq.token_ids[max(start, seq.num_prompt_tokens) :] + assumed  # its last tokens
    for *before, last in bad_words:
        if output[len(output) - len(before) :] == before:
            forbidden.add(last)
    return forbidden


def _forbidden(seq: Sequence, assumed: list[int]) -> set[int]:
    """A sequence's forbidden tokens; none if all of the allowed ones would be forbidden."""
    forbidden, allowed = forbidden_token_ids(seq, assumed), seq.params.allowed_token_ids
    return set() if allowed and all(map(forbidden.__contains__, allowed)) else forbidden


def _penalties(draws: list[Draw]) -> Penalties:
    """Each row's distinct tokens and their counts, padded with the row's first token."""
    counted: dict[int, tuple[Array, Array]] = {}
    for row, (seq, assumed) in enumerate(draws):
        if seq.params.penalizes:
            seq.parts.counts.update(seq)
            counted[row] = seq.parts.counts.after(assumed)
    shape = len(draws), max(len(ids) for ids, _ in counted.values())
    columns: tuple[Array, Array] = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    for row, parts in counted.items():
        for column, part in zip(columns, parts, strict=True):
            column[row] = part[0]
            column[row, : len(part)] = part
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    weights = (_column(getattr(seq.params, name) for seq, _ in draws) for name in names)
    return Penalties(*map(torch.from_numpy, columns), *weights)


def _kind(params: SamplingParams, vocab_size: int) -> tuple[bool, ...]:
    """How a row is drawn: whether with cuts, from candidates, from few candidates, with top_k."""
    cuts = params.cuts
    has_k = cuts and 0 < params.top_k < vocab_size
    few = has_k and are_few(params.top_k, vocab_size)
    return cuts, few or (has_k and params.top_p < 1), few, has_k


def _cuts(params: list[SamplingParams], vocab_size: int) -> Cuts:
    cuts = Cuts()
    if any(p.min_p > 0 for p in params):
        cuts.min_p = _column(p.min_p for p in params)
    if any(p.top_p < 1 for p in params):
        cuts.top_p = _column(p.top_p for p in params)
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    if min(top_k) < vocab_size:
        cuts.top_k = torch.from_numpy(np.array(top_k))[:, None]
    if _kind(params[0], vocab_size)[1]:
        cuts.num_candidates = max(top_k)
    return cuts


def _column(values: Iterable[float]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, np.float32))[:, None]
