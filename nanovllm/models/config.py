"""ModelConfig: the contents of a checkpoint's `config.json`, with one name for each field.

It reads only JSON: no PyTorch, no transformers. An absent field gets the architecture's default
(`registry.py`), or is an error without one. A value that is not supported is an error, and so is a
size that no memory holds.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES, MAX_RANKS
from nanovllm.models.bare import causal_name, lacks_head
from nanovllm.models.quantization.choice import choose_quantization
from nanovllm.models.quantization.rules import NOT_QUANTIZED, Quantization
from nanovllm.models.registry import ARCHITECTURES, DEFAULTS, get_architecture
from nanovllm.models.rope import MAX_POSITIONS, rope_parameters
from nanovllm.models.windows import longest, rotated_layers, sliding_windows
from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int, shorten

MAX_LAYERS = 10_000
MAX_PARAMETERS = 1 << 46  # in 16 bits, they fill a process's address space of 47 bits


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
    itself, or None for all. `rotated_layers` says which layers rotate queries and keys. Without a
    head, because the checkpoint has only the decoder, the embeddings' table takes its place.
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
    quantization: Quantization = NOT_QUANTIZED
    has_head: bool = True

    @property
    def longest_window(self) -> int | None:
        """The largest window of all layers; None if some layer attends to all tokens."""
        return longest(self.sliding_windows)

    @classmethod
    def from_dir(cls, path: Path, quantization: str | None = None) -> "ModelConfig":
        """Read `config.json` (and the EOS ids of `generation_config.json`) in `path`.

        `quantization` is the option of that name.
        """
        with fields_of(path / "config.json") as raw:
            config = cls.parse(raw, quantization)
        if not config.tie_word_embeddings and lacks_head(path):
            config = replace(config, tie_word_embeddings=True, has_head=False)
        if (path / "generation_config.json").exists():
            with fields_of(path / "generation_config.json") as raw:
                eos = config.eos_token_ids | _eos_ids(raw, config.vocab_size)
            object.__setattr__(config, "eos_token_ids", eos)
        return config

    @property
    def sizes(self) -> str:
        """The sizes that decide how large the model is, for error messages."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "head_dim")  # fmt: skip
        sizes = {name: getattr(self, name) for name in names}
        if self.experts:
            sizes["num_experts"] = self.experts.num_experts
            sizes["moe_intermediate_size"] = self.experts.intermediate_size
        return ", ".join(f"{name}={size}" for name, size in sizes.items())

    def check_parallel_size(self, size: int, whole_experts: bool = False) -> None:
        """Raise a ValueError if `size` ranks cannot split this model.

        With `whole_experts`, the ranks split the list of experts instead of each expert.
        """
        if whole_experts and not self._num_experts:
            raise ValueError("enable_expert_parallel=True: this model has no experts")
        if not self._fits(size, whole_experts):
            sizes = (n for n in range(1, MAX_RANKS + 1) if self._fits(n, whole_experts))
            fit = ", ".join(map(str, sizes))
            widths = self._widths(whole_experts)
            widths |= {"num_experts": self._num_experts} if whole_experts else {}
            named = " and ".join(f"{name}={n}" for name, n in widths.items())
            hint = ""
            if self._num_experts and not whole_experts and self._fits(size, whole_experts=True):
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
    def parse(cls, file: Mapping[str, Any], quantization: str | None = None) -> "ModelConfig":
        """Read the fields of a `config.json`."""
        name = _architecture_name(file)
        architecture = get_architecture(name)
        _refuse_unsupported(file)
        raw = {**DEFAULTS, **architecture.defaults, **file, **architecture.fixed}
        num_heads, num_kv_heads, head_dim = _heads(raw, architecture.defaults.get("head_dim"))

        def has_bias(bias: bool | str) -> bool:
            return _flag(raw, bias) if isinstance(bias, str) else bias

        config = cls(
            architecture=name,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=_size(raw, "hidden_size"),
            intermediate_size=_size(raw, "intermediate_size"),
            num_hidden_layers=_size(raw, "num_hidden_layers", MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=check_float("rms_norm_eps", raw["rms_norm_eps"], 0.0, above=True),
            max_position_embeddings=_size(raw, "max_position_embeddings", MAX_POSITIONS),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            rope_parameters=rope_parameters(file, raw, architecture, head_dim),
            dtype=_dtype(raw),
            eos_token_ids=_ids("eos_token_id", raw["eos_token_id"])
            | _eos_ids(file, raw["vocab_size"]),
            qk_norm=architecture.qk_norm,
            qkv_bias=has_bias(architecture.qkv_bias),
            o_bias=has_bias(architecture.o_bias),
            mlp_bias=has_bias(architecture.mlp_bias),
            sliding_windows=sliding_windows(file, raw, architecture),
            rotated_layers=rotated_layers(raw, architecture),
            experts=_experts(raw) if architecture.experts else None,
            quantization=choose_quantization(file, quantization, architecture.fused),
        )
        config._refuse_huge()
        return config

    def _refuse_huge(self) -> None:
        """Raise a ValueError if no memory holds the largest matrices."""
        inner = [self.intermediate_size, self.num_attention_heads * self.head_dim]
        if self.experts:
            inner.append(self.experts.num_experts * self.experts.intermediate_size)
        if self.hidden_size * (self.vocab_size + max(inner)) > MAX_PARAMETERS:
            raise ValueError(f"no memory holds a matrix of the model's sizes: {self.sizes}")


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


@contextlib.contextmanager
def fields_of(path: Path) -> Iterator[dict[str, Any]]:
    """The fields of a file, for a block whose errors are given the file's name."""
    raw = read_json(path)
    try:
        yield raw
    except KeyError as error:
        raise ValueError(f"{path} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None


def _architecture_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if "draft_vocab_size" in raw or "Eagle3" in str(names):
        raise ValueError('this is an EAGLE-3 head; its method in speculative_config is "eagle3"')
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"architectures must be a list of one model class, got {shorten(names)}")
    return causal_name(str(names[0]), ARCHITECTURES)


def _heads(raw: Mapping[str, Any], default_head_dim: int | None) -> tuple[int, int, int]:
    """The numbers of query heads and of key heads, and the dimension of a head."""
    num_heads = _size(raw, "num_attention_heads")
    has_kv_heads = raw["num_key_value_heads"] is not None
    num_kv_heads = _size(raw, "num_key_value_heads") if has_kv_heads else num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of"
            f" num_key_value_heads={num_kv_heads}"
        )
    # Null stands for the quotient only where that is the default, as in transformers.
    has_head_dim = raw["head_dim"] is not None or default_head_dim is not None
    head_dim = _size(raw, "head_dim") if has_head_dim else _size(raw, "hidden_size") // num_heads
    if head_dim % 2 or not head_dim:
        raise ValueError(
            f"head_dim must be even and above 0, got {head_dim}; without it, it is hidden_size="
            f"{raw['hidden_size']} // num_attention_heads={num_heads}"
        )
    return num_heads, num_kv_heads, head_dim


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {shorten(raw['hidden_act'])}")
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        raise ValueError("attention to later tokens (is_causal is false) is not supported")


def _experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    """Read the experts. Transformers 5 writes `num_experts` as `num_local_experts`."""
    num_experts = _size(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")
    step = _size(raw, "decoder_sparse_step")
    dense = raw["mlp_only_layers"]
    if dense is not None and not isinstance(dense, list):
        raise TypeError(f"mlp_only_layers must be a list of numbers, got {shorten(dense)}")
    layers = range(step - 1, raw["num_hidden_layers"], step)
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=check_int("num_experts_per_tok", raw["num_experts_per_tok"], 1, num_experts),
        intermediate_size=_size(raw, "moe_intermediate_size"),
        norm_topk_prob=_flag(raw, "norm_topk_prob"),
        layers=frozenset(layers) - _ids("mlp_only_layers", dense),
    )


def _size(raw: Mapping[str, Any], name: str, high: int | None = None) -> int:
    return check_int(name, raw[name], 1, high)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    return check_bool(name, raw[name])


def _dtype(raw: Mapping[str, Any]) -> str:
    spelt = (name for name in ("dtype", "torch_dtype") if raw.get(name) is not None)
    name = next(spelt, None)
    return "float32" if name is None else check_choice(name, raw[name], DTYPES[1:])


def _eos_ids(file: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """The EOS ids that a file gives; one that the model cannot produce is a ValueError."""
    ids = _ids("eos_token_id", file.get("eos_token_id"))
    if outside := [i for i in ids if i >= vocab_size]:
        raise ValueError(
            f"eos_token_id {shorten(outside)} is outside the vocabulary: vocab_size={vocab_size}"
        )
    return ids


def _ids(name: str, value: Any) -> frozenset[int]:
    """The ids of a field that holds null, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(check_int(name, i, 0) for i in (value if isinstance(value, list) else [value]))
