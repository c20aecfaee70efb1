"""ModelConfig: the contents of a checkpoint's `config.json`, with one name for each field.

It reads only JSON: no PyTorch, no transformers. An absent field gets the architecture's default
(`registry.py`), or is an error without one. A value that is not supported is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES, MAX_RANKS
from nanovllm.models.registry import Architecture, get_architecture
from nanovllm.models.rope import rope_parameters
from nanovllm.utils.checks import check_bool, check_float, check_int

SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of the decoder layers `layers`; each token uses `per_token` of `num_experts`."""

    num_experts: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # whether the shares of a token's experts add up to 1
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; `rope_parameters` holds `rope_type`, `rope_theta` and its factors.

    `sliding_windows` has an entry for each layer: how many tokens a token attends to, including
    itself, or None for all. `rotated_layers` says which layers rotate queries and keys.
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
        """The largest window of all layers; None if some layer attends to all tokens."""
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
        """Raise a ValueError if `size` ranks cannot split this model.

        With `whole_experts`, the ranks split the list of experts instead of each expert.
        """
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
                f"tensor_parallel_size={size} cannot split num_attention_heads"
                f"={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads} and"
                f" {named}; {fit} can{hint}"
            )

    @property
    def _num_experts(self) -> int:
        return self.experts.num_experts if self.experts and self.experts.layers else 0

    def _fits(self, size: int, whole_experts: bool) -> bool:
        """Whether `size` ranks can split the model. Fewer key heads than ranks are replicated."""
        kv_heads = self.num_key_value_heads
        kv_heads_fit = kv_heads % size == 0 or size % kv_heads == 0
        experts_fit = not whole_experts or self._num_experts >= size
        split = (self.num_attention_heads, *self._widths(whole_experts).values())
        return kv_heads_fit and experts_fit and all(n % size == 0 for n in split)

    def _widths(self, whole_experts: bool) -> dict[str, int]:
        """The widths of the feed-forward layers that the ranks split."""
        if self.experts is None:
            return {"intermediate_size": self.intermediate_size}
        widths = {} if whole_experts else {"moe_intermediate_size": self.experts.intermediate_size}
        if len(self.experts.layers) < self.num_hidden_layers:
            widths["intermediate_size"] = self.intermediate_size
        return widths

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "ModelConfig":
        name = _architecture_name(raw)
        architecture = get_architecture(name)
        _refuse_unsupported(raw)
        raw = {**architecture.defaults, **raw, **architecture.fixed}
        num_heads, num_kv_heads, head_dim = _heads(raw)

        def has_bias(bias: bool | str) -> bool:
            return _flag(raw, bias) if isinstance(bias, str) else bias

        return cls(
            architecture=name,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=_size(raw, "hidden_size"),
            intermediate_size=_size(raw, "intermediate_size"),
            num_hidden_layers=_size(raw, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=check_float("rms_norm_eps", raw["rms_norm_eps"], 0.0),
            max_position_embeddings=_size(raw, "max_position_embeddings"),
            tie_word_embeddings=_flag({"tie_word_embeddings": False, **raw}, "tie_word_embeddings"),
            rope_parameters=rope_parameters(raw, name, architecture, head_dim),
            dtype=_dtype(raw),
            eos_token_ids=_ids("eos_token_id", raw.get("eos_token_id")),
            qk_norm=architecture.qk_norm,
            qkv_bias=has_bias(architecture.qkv_bias),
            o_bias=has_bias(architecture.o_bias),
            mlp_bias=has_bias(architecture.mlp_bias),
            sliding_windows=_sliding_windows(raw),
            rotated_layers=_rotated_layers(raw, architecture),
            experts=_experts(raw) if architecture.experts else None,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a broken or missing file is an OSError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; a model directory must have it") from None
    except ValueError as error:
        raise OSError(f"{path} is not valid JSON ({error}); copy or download it again") from None
    if not isinstance(value, dict):
        raise OSError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _architecture_name(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    if len(architectures) != 1:
        raise ValueError(f"architectures must name one model class, got {architectures!r}")
    name: str = architectures[0]
    return name


def _heads(raw: Mapping[str, Any]) -> tuple[int, int, int]:
    """The numbers of query heads and of key heads, and the dimension of a head."""
    num_heads = _size(raw, "num_attention_heads")
    has_kv_heads = raw["num_key_value_heads"] is not None
    num_kv_heads = _size(raw, "num_key_value_heads") if has_kv_heads else num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of"
            f" num_key_value_heads={num_kv_heads}"
        )
    has_head_dim = raw["head_dim"] is not None
    head_dim = _size(raw, "head_dim") if has_head_dim else _size(raw, "hidden_size") // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {raw['hidden_act']!r}")
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(f"quantization_config: quantized weights ({method!r}) are not supported")
    if unknown := sorted(set(raw.get("layer_types") or ()) - {*LAYER_TYPES}):
        raise ValueError(f"layer_types {unknown} are not supported; {', '.join(LAYER_TYPES)} are")


def _sliding_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, or for all layers from `max_window_layers` on."""
    num_layers = _size(raw, "num_hidden_layers")
    window = raw["sliding_window"] if _flag(raw, "use_sliding_window") else None
    if window is not None:
        check_int("sliding_window", window, 1)
    if (types := raw.get("layer_types")) is None:
        first = check_int("max_window_layers", raw["max_window_layers"], 0) if window else 0
        return (None,) * min(first, num_layers) + (window,) * max(num_layers - first, 0)
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries, num_hidden_layers={num_layers}")
    if SLIDING in types and window is None:
        raise ValueError("layer_types has sliding-window attention, but sliding_window is not set")
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
    """Read the experts. Transformers 5 writes `num_experts` as `num_local_experts`."""
    num_experts = _size(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")
    step = _size(raw, "decoder_sparse_step")
    dense = _ids("mlp_only_layers", raw["mlp_only_layers"])
    layers = range(step - 1, raw["num_hidden_layers"], step)
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=check_int("num_experts_per_tok", raw["num_experts_per_tok"], 1, num_experts),
        intermediate_size=_size(raw, "moe_intermediate_size"),
        norm_topk_prob=_flag(raw, "norm_topk_prob"),
        layers=frozenset(layers) - dense,
    )


def _size(raw: Mapping[str, Any], name: str) -> int:
    return check_int(name, raw[name], 1)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    return check_bool(name, raw[name])


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES[1:]:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES[1:])}, got {dtype!r}")
    return str(dtype)


def _ids(name: str, value: Any) -> frozenset[int]:
    """The ids of a field that holds null, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(check_int(name, i, 0) for i in (value if isinstance(value, list) else [value]))
