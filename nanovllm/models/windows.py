"""Read from a `config.json` which layers have a sliding window, and which rotate queries and keys.

Plain data: no PyTorch. A list that does not fit the number of layers is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.utils.checks import check_bool, check_int, shorten

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
Windows = tuple[int | None, ...]  # of each layer; None attends to all tokens


def sliding_windows(
    raw: Mapping[str, Any], file: Mapping[str, Any], can_have: Sequence[bool] | None = None
) -> Windows:
    """Each layer's window, of a config's `file` and `raw`, its fields with the defaults.

    `layer_types` that the family does not read must say the same. Without them, only layers that
    `can_have` one have a window.
    """
    given = file.get("layer_types")
    if given is not None and not isinstance(given, list):
        raise TypeError(f"layer_types must be a list, got {shorten(given)}")
    if unknown := [kind for kind in given or () if kind not in LAYER_TYPES]:
        allowed = ", ".join(LAYER_TYPES)
        raise ValueError(f"layer_types {shorten(unknown)} are not supported; {allowed} are")
    windows = _windows(raw, can_have)
    if given not in (None, [SLIDING if window else FULL for window in windows]):
        raise ValueError(
            f"layer_types {shorten(given)} contradict the windows of {raw['architectures'][0]}'s"
            f" layers: {shorten(list(windows))}"
        )
    return windows


def _windows(raw: Mapping[str, Any], can_have: Sequence[bool] | None) -> Windows:
    """The windows by `layer_types`, or without it, of the layers from `max_window_layers` on."""
    num_layers: int = raw["num_hidden_layers"]
    uses_windows = check_bool("use_sliding_window", raw["use_sliding_window"])
    window = raw["sliding_window"] if uses_windows else None
    if window is not None:
        check_int("sliding_window", window, 1)
    if (types := raw["layer_types"]) is None:
        first = check_int("max_window_layers", raw["max_window_layers"], 0) if window else 0
        allowed = can_have or (True,) * num_layers
        return tuple(
            window if index >= first and allowed[index] else None for index in range(num_layers)
        )
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries, num_hidden_layers={num_layers}")
    if SLIDING in types and window is None:
        raise ValueError("layer_types has sliding-window attention, but sliding_window is not set")
    return tuple(window if kind == SLIDING else None for kind in types)


def rotated_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """The layers with a 1 in `no_rope_layers`; without that field, all but every Nth."""
    num_layers: int = raw["num_hidden_layers"]
    flags = raw["no_rope_layers"]
    if flags is None:
        interval = check_int("no_rope_layer_interval", raw["no_rope_layer_interval"], 1)
        return tuple(index % interval != 0 for index in range(1, num_layers + 1))
    if not isinstance(flags, list) or len(flags) < num_layers:
        needed = f"a list of {num_layers} numbers"
        raise ValueError(f"no_rope_layers must be {needed}, got {shorten(flags)}")
    return tuple(bool(check_int("no_rope_layers", flag, 0, 1)) for flag in flags[:num_layers])
