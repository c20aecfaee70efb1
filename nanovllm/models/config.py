"""ModelConfig: what a checkpoint's `config.json` says, in one spelling, with no defaults guessed.

It reads JSON only: no PyTorch, no transformers. What it cannot honour, it refuses.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES, MAX_RANKS
from nanovllm.utils.checks import check_bool, check_float, check_int

ROPE_FIELDS = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; `rope_parameters` holds `rope_type`, `rope_theta` and its factors."""

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
    attention_bias: bool
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]
    dtype: str
    eos_token_ids: frozenset[int]

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

    def check_parallel_size(self, size: int) -> None:
        """Refuse a number of ranks that cannot share this model out."""
        if not self._ranks_divide(size):
            fit = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if self._ranks_divide(n))
            raise ValueError(
                f"tensor_parallel_size={size} cannot share out num_attention_heads"
                f"={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads} and"
                f" intermediate_size={self.intermediate_size}; {fit} can"
            )

    def _ranks_divide(self, size: int) -> bool:
        """Key heads may also be fewer than ranks, which then hold copies."""
        kv_heads = self.num_key_value_heads
        each_has_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
        shared = self.num_attention_heads % size == self.intermediate_size % size == 0
        return shared and each_has_kv_heads

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "ModelConfig":
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError(f"architectures must name one model class, got {architectures!r}")
        _refuse_unsupported(raw)

        def size(name: str) -> int:
            return check_int(name, raw[name], 1)

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
        for name in ("attention_bias", "tie_word_embeddings"):
            check_bool(name, raw.get(name, False))
        return cls(
            architecture=architectures[0],
            vocab_size=size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=check_float("rms_norm_eps", raw["rms_norm_eps"], 0.0),
            max_position_embeddings=size("max_position_embeddings"),
            attention_bias=raw.get("attention_bias", False),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            rope_parameters=_rope_parameters(raw),
            dtype=_dtype(raw),
            eos_token_ids=_ids("eos_token_id", raw.get("eos_token_id")),
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
    layer_types = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if raw.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise ValueError("sliding-window attention is not supported")
    if layer_types:
        raise ValueError(f"layer_types {layer_types} are not supported, 'full_attention' is")


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge transformers 5's `rope_parameters` with 4's `rope_theta` and `rope_scaling`."""
    parameters: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name) or {}
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be an object, got {value!r}")
        parameters |= value
    legacy_type = parameters.pop("type", None)
    rope_type = parameters.setdefault("rope_type", legacy_type or "default")
    if legacy_type not in (None, rope_type):
        raise ValueError(f"rope_type {rope_type!r} and its old name {legacy_type!r} disagree")
    if parameters["rope_theta"] is None:
        raise KeyError("rope_theta")
    if (rope_type == "default") == ("factor" in parameters):
        needs = "takes no" if rope_type == "default" else "needs a"
        raise ValueError(f"rope_type {rope_type!r} {needs} factor")
    for name, value in parameters.items():
        if name not in ROPE_FIELDS:
            raise ValueError(f"rope parameter {name!r} is not supported")
        if name not in ("rope_type", "truncate") and value is not None:
            check_float(name, value, 1.0 if name in ("rope_theta", "factor") else 0.0)
    return parameters


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
