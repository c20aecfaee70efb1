"""Read and check the fields of a `config.json`, for all families.

An absent field gets the family's default; without a default it is an error. No PyTorch here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.config import DTYPES, MAX_POSITIONS
from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int, shorten

MAX_LAYERS = 10_000
# The values that most of transformers' config classes give to absent fields.
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0,
    "layer_types": None, "eos_token_id": None,
}  # fmt: skip
# Values for fields that an architecture does not read.
NO_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "layer_types": None}
EVERY_LAYER: Mapping[str, Any] = {"max_window_layers": 0, "layer_types": None}  # has the window


class Fields(dict[str, Any]):
    """The fields of a `file`, with default values for absent ones.

    `defaults` has transformers' values where they differ from `DEFAULTS`. `fixed` has the values of
    fields that transformers does not read for this architecture: it overrides the file.
    """

    def __init__(
        self,
        file: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__({**DEFAULTS, **defaults, **file, **(fixed or {})})
        self.file = file
        self.default_head_dim: int | None = defaults.get("head_dim")

    @property
    def architecture(self) -> str:
        """The name that the file gives to the architecture, for messages."""
        return str(self["architectures"][0])

    def size(self, name: str, high: int | None = None) -> int:
        """A number of at least 1."""
        return check_int(name, self[name], 1, high)

    def flag(self, name: str) -> bool:
        """True or False."""
        return check_bool(name, self[name])

    def number(self, name: str, low: float = 0.0) -> float:
        """A number above `low`."""
        return check_float(name, self[name], low, above=True)


def decoder_fields(
    fields: Fields,
    *,
    partial_rotary: bool = False,
    old_rope_types: Mapping[str, str] | None = None,
    has_unrotated: bool = False,
) -> dict[str, Any]:
    """The fields of every decoder's config, by our names.

    `partial_rotary` and `old_rope_types` are for `rope_parameters`. If the family `has_unrotated`
    layers, only those can have a window.
    """
    num_heads, num_kv_heads, head_dim = heads(fields)
    num_layers = fields.size("num_hidden_layers", MAX_LAYERS)
    rotated, can_have_window = (True,) * num_layers, None
    if has_unrotated:
        from nanovllm.models.windows import rotated_layers

        rotated = rotated_layers(fields)
        can_have_window = [not each for each in rotated]
    return dict(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.size("max_position_embeddings", MAX_POSITIONS),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        eos_token_ids=ids("eos_token_id", fields["eos_token_id"])
        | eos_ids(fields.file, fields["vocab_size"]),
        rope_parameters=_rope_parameters(fields, head_dim, partial_rotary, old_rope_types or {}),
        sliding_windows=_sliding_windows(fields, can_have_window),
        rotated_layers=rotated,
    )


def _rope_parameters(
    fields: Fields, head_dim: int, partial: bool, old_types: Mapping[str, str]
) -> dict[str, Any]:
    """The rope parameters; `rope_type` and `rope_theta` are always present.

    A rotation of a part of each head is a ValueError, unless the family has `partial` ones.
    `old_types` are other names of rope types.
    """
    given = [fields.file.get(name) for name in ("rope_scaling", "rope_parameters")]
    rotates_whole = fields.file.get("partial_rotary_factor") is None
    if rotates_whole and all(value in (None, {}) for value in given):
        theta = check_float("rope_theta", fields["rope_theta"], 1.0, above=True)
        return {"rope_type": "default", "rope_theta": theta}
    from nanovllm.models.rope import rope_parameters

    return rope_parameters(fields, fields.file, head_dim, partial, old_types)


def _sliding_windows(fields: Fields, can_have: Sequence[bool] | None) -> tuple[int | None, ...]:
    """Each layer's window, or None."""
    has_window = fields.flag("use_sliding_window") and fields["sliding_window"] is not None
    types = fields["layer_types"], fields.file.get("layer_types")
    if not has_window and types == (None, None):
        return (None,) * fields.size("num_hidden_layers")
    from nanovllm.models.windows import sliding_windows

    return sliding_windows(fields, fields.file, can_have)


def heads(fields: Fields) -> tuple[int, int, int]:
    """The numbers of query heads and of key heads, and the dimension of a head."""
    num_heads = fields.size("num_attention_heads")
    has_kv_heads = fields["num_key_value_heads"] is not None
    num_kv_heads = fields.size("num_key_value_heads") if has_kv_heads else num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of"
            f" num_key_value_heads={num_kv_heads}"
        )
    # Null stands for the quotient only where that is the default, as in transformers.
    has_head_dim = fields["head_dim"] is not None or fields.default_head_dim is not None
    head_dim = fields.size("head_dim") if has_head_dim else fields.size("hidden_size") // num_heads
    if head_dim % 2 or not head_dim:
        raise ValueError(
            f"head_dim must be even and above 0, got {head_dim}; without it, it is hidden_size="
            f"{fields['hidden_size']} // num_attention_heads={num_heads}"
        )
    return num_heads, num_kv_heads, head_dim


def check_activation(fields: Fields, supported: str = "silu", name: str = "hidden_act") -> None:
    """Raise unless the activation is the one that the family has."""
    if fields[name] != supported:
        raise ValueError(f"{name} must be {supported!r}, got {shorten(fields[name])}")


def ids(name: str, value: Any) -> frozenset[int]:
    """The ids of a field that holds null, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(check_int(name, i, 0) for i in (value if isinstance(value, list) else [value]))


def eos_ids(file: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """The EOS ids that a file gives; one that the model cannot produce is a ValueError."""
    found = ids("eos_token_id", file.get("eos_token_id"))
    if outside := [i for i in found if i >= vocab_size]:
        raise ValueError(
            f"eos_token_id {shorten(outside)} is outside the vocabulary: vocab_size={vocab_size}"
        )
    return found


def _dtype(raw: Mapping[str, Any]) -> str:
    spelt = (name for name in ("dtype", "torch_dtype") if raw.get(name) is not None)
    name = next(spelt, None)
    return "float32" if name is None else check_choice(name, raw[name], DTYPES[1:])
