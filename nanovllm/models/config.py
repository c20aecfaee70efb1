"""ModelConfig: what a checkpoint's `config.json` says, in one spelling.

It reads JSON only: no PyTorch, no transformers. What a file leaves out is what the architecture
says (`registry.py`), or an error; what it cannot honour, it refuses.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES, MAX_RANKS
from nanovllm.models.registry import Architecture, get_architecture
from nanovllm.utils.checks import check_bool, check_float, check_int

ROPE_FIELDS = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor", "short_factor", "long_factor",
)  # fmt: skip
# Where a model was first trained, which these types need; beside `rope_parameters` it goes first.
TRAINED_LENGTH = "original_max_position_embeddings"
SLIDING = "sliding_attention"
NEEDS_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of which a token takes `per_token`, in the decoder layers `layers`."""

    num_experts: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # whether the shares of those that are taken add up to 1
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; `rope_parameters` holds `rope_type`, `rope_theta` and its factors.

    `sliding_windows` has an entry for each layer: how many tokens back it attends, itself counted,
    or None for all. `rotated_layers` says which layers rotate queries and keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]
    dtype: str
    eos_token_ids: frozenset[int]
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    rotated_layers: tuple[bool, ...]
    experts: ExpertsConfig | None = None

    @property
    def longest_window(self) -> int | None:
        """How many tokens back any layer attends; None if some layer attends to all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_hidden_layers else None

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `config.json` (and the EOS ids of `generation_config.json`) in `path`."""
        raw = read_json(path / "config.json")
        try:
            config = cls._parse(raw)
        except KeyError as error:
            raise ValueError(f"{path / 'config.json'} has no field {error}") from None
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path / 'config.json'}: {error}") from None
        if (path / "generation_config.json").exists():
            generation = read_json(path / "generation_config.json")
            eos = config.eos_token_ids | _ids("eos_token_id", generation.get("eos_token_id"))
            object.__setattr__(config, "eos_token_ids", eos)
        return config

    def check_parallel_size(self, size: int, whole_experts: bool = False) -> None:
        """Refuse a number of ranks that cannot share this model out, or its `whole_experts`."""
        num_experts = self._num_experts
        if whole_experts and not num_experts:
            raise ValueError("enable_expert_parallel=True: this model has no experts")
        if not self._fits(size, whole_experts):
            sizes = (n for n in range(1, MAX_RANKS + 1) if self._fits(n, whole_experts))
            fit = ", ".join(map(str, sizes))
            widths = self._widths(whole_experts)
            widths |= {"num_experts": num_experts} if whole_experts else {}
            named = " and ".join(f"{name}={n}" for name, n in widths.items())
            hint = ""
            if num_experts and not whole_experts and self._fits(size, whole_experts=True):
                hint = f", and {size} can with enable_expert_parallel=True"
            raise ValueError(
                f"tensor_parallel_size={size} cannot share out num_attention_heads"
                f"={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads} and"
                f" {named};"
                f" {fit} can{hint}"
            )

    @property
    def _num_experts(self) -> int:
        return self.experts.num_experts if self.experts and self.experts.layers else 0

    def _fits(self, size: int, whole_experts: bool) -> bool:
        """Key heads may also be fewer than ranks, which then hold copies."""
        kv_heads = self.num_key_value_heads
        each_has_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
        each_has_experts = not whole_experts or self._num_experts >= size
        shared = (self.num_attention_heads, *self._widths(whole_experts).values())
        return each_has_kv_heads and each_has_experts and all(n % size == 0 for n in shared)

    def _widths(self, whole_experts: bool) -> dict[str, int]:
        """The widths of the feed-forward layers that the ranks share out."""
        if self.experts is None:
            return {"intermediate_size": self.intermediate_size}
        widths = {} if whole_experts else {"moe_intermediate_size": self.experts.intermediate_size}
        if len(self.experts.layers) < self.num_hidden_layers:
            widths["intermediate_size"] = self.intermediate_size
        return widths

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "ModelConfig":
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError(f"architectures must name one model class, got {architectures!r}")
        name = architectures[0]
        architecture = get_architecture(name)
        _refuse_unsupported(raw)
        raw = {**architecture.defaults, **raw, **architecture.fixed}

        def size(name: str) -> int:
            return check_int(name, raw[name], 1)

        def flag(says: bool | str) -> bool:
            return _flag(says, raw[says]) if isinstance(says, str) else says

        num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
        null = raw["num_key_value_heads"] is None
        num_kv_heads = num_heads if null else size("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads={num_heads} is not a multiple of"
                f" num_key_value_heads={num_kv_heads}"
            )
        head_dim = hidden_size // num_heads if raw["head_dim"] is None else size("head_dim")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        return cls(
            architecture=name,
            vocab_size=size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=check_float("rms_norm_eps", raw["rms_norm_eps"], 0.0),
            max_position_embeddings=size("max_position_embeddings"),
            tie_word_embeddings=_flag("tie_word_embeddings", raw.get("tie_word_embeddings", False)),
            rope_parameters=_rope_parameters(raw, name, architecture, head_dim),
            dtype=_dtype(raw),
            eos_token_ids=_ids("eos_token_id", raw.get("eos_token_id")),
            qk_norm=architecture.qk_norm,
            qkv_bias=flag(architecture.qkv_bias),
            o_bias=flag(architecture.o_bias),
            mlp_bias=flag(architecture.mlp_bias),
            sliding_windows=_sliding_windows(raw),
            rotated_layers=_rotated_layers(raw, architecture),
            experts=_experts(raw) if architecture.experts else None,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a broken or missing file is an OSError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; a model directory must have it") from None
    except ValueError as error:
        raise OSError(f"{path} is not valid JSON ({error}); copy or download it again") from None
    if not isinstance(value, dict):
        raise OSError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {raw['hidden_act']!r}")
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(f"quantization_config: quantized weights ({method!r}) are not supported")
    if unknown := sorted(set(raw.get("layer_types") or ()) - {"full_attention", SLIDING}):
        raise ValueError(f"layer_types {unknown} are not supported, 'full_attention' is")


def _sliding_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, or from the layer `max_window_layers` on."""
    num_layers = check_int("num_hidden_layers", raw["num_hidden_layers"], 1)
    used = _flag("use_sliding_window", raw["use_sliding_window"])
    window = raw["sliding_window"] if used else None
    if window is not None:
        check_int("sliding_window", window, 1)
    if (types := raw.get("layer_types")) is None:
        first = check_int("max_window_layers", raw["max_window_layers"], 0) if window else 0
        return (None,) * min(first, num_layers) + (window,) * max(num_layers - first, 0)
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries, num_hidden_layers={num_layers}")
    if SLIDING in types and window is None:
        raise ValueError("layer_types asks for sliding-window attention, sliding_window for none")
    return tuple(window if kind == SLIDING else None for kind in types)


def _rotated_layers(raw: Mapping[str, Any], architecture: Architecture) -> tuple[bool, ...]:
    """All layers, or those with a 1 in `no_rope_layers`; without it all but every Nth."""
    num_layers = check_int("num_hidden_layers", raw["num_hidden_layers"], 1)
    if not architecture.unrotated_layers:
        return (True,) * num_layers
    flags = raw["no_rope_layers"]
    if flags is None:
        interval = check_int("no_rope_layer_interval", raw["no_rope_layer_interval"], 1)
        return tuple(index % interval != 0 for index in range(1, num_layers + 1))
    if not isinstance(flags, list) or len(flags) < num_layers:
        raise ValueError(f"no_rope_layers must be a list of {num_layers} numbers, got {flags!r}")
    return tuple(bool(check_int("no_rope_layers", flag, 0, 1)) for flag in flags[:num_layers])


def _experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    """Read the experts; transformers 5 calls `num_experts` `num_local_experts`."""
    spelling = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    num_experts = check_int(spelling, raw[spelling], 1)
    step = check_int("decoder_sparse_step", raw["decoder_sparse_step"], 1)
    dense = _ids("mlp_only_layers", raw["mlp_only_layers"])
    layers = range(step - 1, raw["num_hidden_layers"], step)
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=check_int("num_experts_per_tok", raw["num_experts_per_tok"], 1, num_experts),
        intermediate_size=check_int("moe_intermediate_size", raw["moe_intermediate_size"], 1),
        norm_topk_prob=_flag("norm_topk_prob", raw["norm_topk_prob"]),
        layers=frozenset(layers) - dense,
    )


def _rope_parameters(
    raw: Mapping[str, Any], name: str, architecture: Architecture, head_dim: int
) -> dict[str, Any]:
    """Merge transformers 5's `rope_parameters` with 4's `rope_theta` and `rope_scaling`."""
    beside = ("rope_theta", "partial_rotary_factor")
    parameters = {n: raw[n] for n in beside if raw.get(n) is not None}
    for spelling in ("rope_scaling", "rope_parameters"):
        value = raw.get(spelling) or {}
        if not isinstance(value, dict):
            raise TypeError(f"{spelling} must be an object, got {value!r}")
        parameters |= {n: v for n, v in value.items() if v is not None or n == "rope_type"}
    legacy_type = parameters.pop("type", None)
    rope_type = parameters.setdefault("rope_type", legacy_type or "default")
    if legacy_type not in (None, rope_type):
        raise ValueError(f"rope_type {rope_type!r} and its old name {legacy_type!r} disagree")
    rope_type = architecture.rope_types.get(rope_type, rope_type)
    parameters["rope_type"] = rope_type
    if rope_type in NEEDS_TRAINED_LENGTH and raw.get(TRAINED_LENGTH) is not None:
        parameters[TRAINED_LENGTH] = raw[TRAINED_LENGTH]
    if "rope_theta" not in parameters:
        raise KeyError("rope_theta")
    if rope_type != "longrope" and (rope_type == "default") == ("factor" in parameters):
        needs = "takes no" if rope_type == "default" else "needs a"
        raise ValueError(f"rope_type {rope_type!r} {needs} factor")
    _check_rope_values(parameters)
    _check_rotated_part(parameters, name, architecture, head_dim)
    return parameters


def _check_rope_values(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name not in ROPE_FIELDS:
            raise ValueError(f"rope parameter {name!r} is not supported")
        if name in ("rope_type", "truncate"):
            continue
        if name not in ("short_factor", "long_factor"):
            check_float(name, value, 1.0 if name in ("rope_theta", "factor") else 0.0)
        elif not isinstance(value, list):
            raise TypeError(f"{name} must be a list of numbers, got {value!r}")
        else:
            for number in value:
                check_float(name, number, 0.0, above=True)


def _check_rotated_part(
    parameters: Mapping[str, Any], name: str, architecture: Architecture, head_dim: int
) -> None:
    """A part of each head may be rotated, and longrope has a factor for each of its pairs."""
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not architecture.partial_rotary:
        raise ValueError(f"partial_rotary_factor={part}: {name} rotates heads whole")
    rotated = int(head_dim * part)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor={part} of head_dim={head_dim} is {rotated}, which must be an"
            " even number and fit"
        )
    for factors in ("short_factor", "long_factor"):
        if factors in parameters and len(parameters[factors]) != rotated // 2:
            raise ValueError(
                f"{factors} must have {rotated // 2} numbers, got {len(parameters[factors])}"
            )


def _flag(name: str, value: Any) -> bool:
    check_bool(name, value)
    return bool(value)


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES[1:]:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES[1:])}, got {dtype!r}")
    return str(dtype)


def _ids(name: str, value: Any) -> frozenset[int]:
    """Normalize an entry of token ids: none, one id, or several."""
    if value is None:
        return frozenset()
    return frozenset(check_int(name, i, 0) for i in (value if isinstance(value, list) else [value]))
