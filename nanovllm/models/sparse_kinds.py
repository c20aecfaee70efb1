"""Which layers have experts, by `mlp_layer_types`."""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm.models.layer_kinds import checked_kinds
from nanovllm.utils.checks import shorten

DENSE, SPARSE = KINDS = ("dense", "sparse")


def sparse_layers(
    raw: Mapping[str, Any], num_layers: int, other: str = "", by_other: Collection[int] = ()
) -> frozenset[int]:
    """The layers with experts; without `mlp_layer_types`, all but the first.

    If the file has the field `other`, which says `by_other`, both must agree.
    """
    kinds = raw["mlp_layer_types"]
    if kinds is None:
        kinds = [DENSE] + [SPARSE] * (num_layers - 1)
    checked = checked_kinds("mlp_layer_types", kinds, KINDS, num_layers)
    found = frozenset(index for index, kind in enumerate(checked) if kind == SPARSE)
    if other and raw.get(other) is not None and found != {*by_other}:
        raise ValueError(
            f"{other}={shorten(raw[other])} contradicts mlp_layer_types={shorten([*checked])}"
        )
    return found
