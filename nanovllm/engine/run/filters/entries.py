"""Entries: which logits the token ids of requests select, as arrays of rows and ids.

A list of a request may have 100,000 ids: it becomes an array once for each SamplingParams, and a
step joins arrays.
"""

import functools
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
import torch

from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.layers.filters import Entries
from nanovllm.sampling_params import SamplingParams

Row = tuple[int, Sequence, list[int]]  # with the tokens assumed before the drawn one
IdsOfRows = list[tuple[int, Any]]  # pairs of a row and its token ids
ParamsOfRows = list[tuple[int, SamplingParams]]

_kept: dict[int, tuple[Array, Array, Array, Array]] = {}  # by the id() of living SamplingParams


def allowed_entries(params_of_rows: ParamsOfRows) -> tuple[torch.Tensor, Entries]:
    """The rows, and the ids that each of them allows."""
    arrays = [_arrays(params)[0] for _, params in params_of_rows]
    rows = np.array([row for row, _ in params_of_rows])
    return torch.from_numpy(rows), _entries(rows, arrays, np.concatenate(arrays))


def biased_entries(params_of_rows: ParamsOfRows) -> tuple[Entries, torch.Tensor]:
    """The ids that have biases in each row, and the biases."""
    _, ids, biases, _ = zip(*(_arrays(params) for _, params in params_of_rows), strict=True)
    rows = np.array([row for row, _ in params_of_rows])
    return _entries(rows, ids, np.concatenate(ids)), torch.from_numpy(np.concatenate(biases))


def forbidden_entries(ids_of_rows: IdsOfRows) -> Entries:
    """The ids that each row forbids, which vary from step to step."""
    rows, lists = zip(*ids_of_rows, strict=True)
    return _entries(np.array(rows), lists, np.concatenate(lists))


def stop_ids(seq: Sequence) -> Array:
    """The stop tokens of a sequence; some may be there twice."""
    eos = _eos_ids(seq.eos_token_ids)
    return np.append(eos, _arrays(seq.params)[3]) if seq.params.stop_token_ids else eos


@functools.lru_cache(16)
def _eos_ids(ids: frozenset[int]) -> Array:
    return np.array([*ids], np.int64)


def _arrays(params: SamplingParams) -> tuple[Array, Array, Array, Array]:
    """Allowed ids, biased ids, biases and ids that stop, kept as long as `params` live."""
    key = id(params)  # the hash of `params` would read all ids
    if key not in _kept:
        bias = params.logit_bias or {}
        _kept[key] = (
            np.array(params.allowed_token_ids or (), np.int64),
            np.array([*bias], np.int64),
            np.array([*bias.values()], np.float32),
            np.array(params.stop_token_ids or (), np.int64),
        )
        weakref.finalize(params, _kept.pop, key).atexit = False
    return _kept[key]


def _entries(rows: Array, lists: Listed[Any], ids: Array) -> Entries:
    """The joined `ids` of the lists, each with its row."""
    return torch.from_numpy(np.repeat(rows, [*map(len, lists)])), torch.from_numpy(ids)


def column_of(values: Iterable[float]) -> torch.Tensor:
    """A number for each row, [R, 1] in float32."""
    return torch.from_numpy(np.fromiter(values, np.float32))[:, None]
