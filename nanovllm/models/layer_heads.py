"""Read the sizes of heads of models whose layers of each type have heads of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_int, shorten

Sizes = tuple[int, int]  # the number of key heads of a layer, and the size of its heads
DEFAULTS = {"global_head_dim": 512}
NAMES = ("num_key_value_heads", "head_dim")


def layer_heads(raw: Mapping[str, Any], types: Sequence[str]) -> tuple[Sizes, ...]:
    """The sizes of each layer. Today's files list layers with other sizes in `per_layer_config`."""
    listed = raw.get("per_layer_config")
    if listed is None:
        full = _full_heads(raw)
        listed = {str(index): full for index, kind in enumerate(types) if kind == FULL}
    if not isinstance(listed, Mapping):
        raise TypeError(f"per_layer_config must be an object, got {shorten(listed)}")
    found = [_sizes(raw, listed.get(str(index), {})) for index in range(len(types))]
    for kind, sizes in zip(types, found, strict=True):
        if sizes != found[types.index(kind)]:
            raise ValueError(f"per_layer_config: layers of {kind} must have equal heads")
    if unknown := listed.keys() - {str(index) for index in range(len(types))}:
        raise ValueError(f"per_layer_config: there are no layers {shorten(sorted(unknown))}")
    return tuple(found)


def _full_heads(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What old files say of layers without a window; the number only where keys are values."""
    names = {"head_dim": "global_head_dim"}
    if raw["attention_k_eq_v"]:
        names["num_key_value_heads"] = "num_global_key_value_heads"
    found = {ours: raw.get(name, DEFAULTS.get(name)) for ours, name in names.items()}
    return {
        ours: check_int(names[ours], value, 1) for ours, value in found.items() if value is not None
    }


def _sizes(raw: Mapping[str, Any], own: Mapping[str, Any]) -> Sizes:
    if not isinstance(own, Mapping) or own.keys() - {*NAMES}:
        raise ValueError(f"per_layer_config: only {', '.join(NAMES)} may differ, got {own}")
    kv_heads, head_dim = (check_int(n, {**raw, **own}[n], 1) for n in NAMES)
    num_heads = raw["num_attention_heads"]
    if num_heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"num_attention_heads={num_heads} must be a multiple of num_key_value_heads="
            f"{kv_heads}, and head_dim={head_dim} even"
        )
    return kv_heads, head_dim


def head_dims(types: Sequence[str], sizes: Sequence[Sizes]) -> dict[str, int]:
    """The size of heads of the layers of each type."""
    return {kind: head_dim for kind, (_, head_dim) in zip(types, sizes, strict=True)}
