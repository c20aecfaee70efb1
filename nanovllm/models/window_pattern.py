"""The windows of configs in which every Nth layer has none, with or without `layer_types`."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.fields import MAX_LAYERS
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_int, shorten

# `layer_types` says which layers have a window.
FIXED: Mapping[str, Any] = {"use_sliding_window": True, "max_window_layers": 0}
PATTERN = "sliding_window_pattern"
LETTERS = {"L": SLIDING, "G": FULL}


def with_layer_types(
    file: Mapping[str, Any], defaults: Mapping[str, Any], interval: int = 4
) -> dict[str, Any]:
    """The file with `layer_types`. If it has none, `sliding_window_pattern` decides.

    The pattern is the distance of layers without a window, by default `interval`, or the letters L
    (a window) and G (none) of the first layers, which the next layers repeat. `layer_types` that
    contradict a pattern of the file are a ValueError.
    """
    raw = {**defaults, **file}
    num_layers = check_int("num_hidden_layers", raw["num_hidden_layers"], 1, MAX_LAYERS)
    pattern, given = file.get(PATTERN), file.get("layer_types")
    types = _types(num_layers, interval if pattern is None else pattern)
    if given is None:
        return {**file, "layer_types": types}
    # Tools that write letters let the last layer have no window in any case.
    if pattern is not None and isinstance(given, list) and given[:-1] != types[:-1]:
        raise ValueError(f"layer_types {shorten(given)} contradict {PATTERN}={shorten(pattern)}")
    return {**file}


def _types(num_layers: int, pattern: Any) -> list[str]:
    if isinstance(pattern, str) and pattern and not {*pattern} - {*LETTERS}:
        return [LETTERS[pattern[index % len(pattern)]] for index in range(num_layers)]
    interval = check_int(PATTERN, pattern, 1)
    return [SLIDING if index % interval else FULL for index in range(1, num_layers + 1)]
