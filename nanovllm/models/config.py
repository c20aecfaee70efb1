"""ModelConfig: the contents of a checkpoint's `config.json`, with one name for each field.

The model's family reads them (`family.py`). Only JSON is read: no PyTorch, no transformers. An
unsupported value is an error, and so is a model that is too large for any memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names, is_quantized
from nanovllm.layers.cache_spec import KeysAndValues, State, TokenCache
from nanovllm.models.checkpoint import fields_of
from nanovllm.models.family import architectures, family_of, registered
from nanovllm.models.fields import eos_ids
from nanovllm.models.shapes import LayerShape, attention_matrices, gated_matrices
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from nanovllm.formats.quantization import Quantization

MAX_PARAMETERS = 1 << 46  # in 16 bits, they fill a process's address space of 47 bits

NO_HEAD = (
    "this model has no head (lm_head), so that it generates nothing; embed and encode compute its"
    " vectors"
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder; `rope_parameters` holds `rope_type`, `rope_theta` and its factors.

    `sliding_windows` has an entry for each layer: how many tokens a token attends to, including
    itself, or None for all. `rotated_layers` says which layers rotate queries and keys. Without a
    head, because the checkpoint has only the decoder, the embeddings' table takes its place.

    A family adds fields of its own in a subclass. `layers` has what the engine needs to know before
    the model is built. A family with layers of another shape overrides `layer_shape`. `num_outside`
    counts parameters outside of the layers, besides the tables and the weight of the last norm.
    """

    architecture: str = ""
    family: str = ""  # "module:NAME", for processes that import it; "" for those of this package
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
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...]
    rotated_layers: tuple[bool, ...]
    quantization: "Quantization | None" = None  # None: plain weights
    has_head: bool = True
    num_outside: int = 0

    @classmethod
    def from_dir(cls, path: Path, quantization: str | None = None) -> "ModelConfig":
        """Read `config.json` (and the EOS ids of `generation_config.json`) in `path`.

        `quantization` is the option of that name.
        """
        with fields_of(path / "config.json") as raw:
            config = cls.parse(raw, quantization)
        if not config.tie_word_embeddings:
            from nanovllm.models.bare import lacks_head

            if lacks_head(path):
                config = replace(config, tie_word_embeddings=True, has_head=False)
        if (path / "generation_config.json").exists():
            with fields_of(path / "generation_config.json") as raw:
                eos = config.eos_token_ids | eos_ids(raw, config.vocab_size)
            object.__setattr__(config, "eos_token_ids", eos)
        return config

    @classmethod
    def parse(cls, file: Mapping[str, Any], quantization: str | None = None) -> "ModelConfig":
        """Read the fields of a `config.json`, as the architecture's family does."""
        name = _architecture_name(file)
        family = family_of(name)
        later = file.get("use_bidirectional_attention") not in (None, False, "vision")  # of images
        if file.get("is_causal") is False or later:
            raise ValueError("attention to later tokens (is_causal is false) is not supported")
        config = family.read(file)
        if not isinstance(config, ModelConfig):
            raise TypeError(f"the family of {name} must read a ModelConfig, got {shorten(config)}")
        reference = ""  # in this package
        if name in registered:
            from nanovllm.models.outside import family_reference

            reference = family_reference(name)
        config = replace(
            config,
            architecture=name,
            family=reference,
            quantization=_quantization(file, quantization, family.names),
        )
        config._refuse_huge()
        config._check_caches()
        return config

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        return tuple(self.layer_shape(index) for index in range(self.num_hidden_layers))

    def heads(self, index: int) -> KeysAndValues:
        """The heads of a layer's attention, of all ranks together, and its window.

        For families to override if layers have different ones.
        """
        return KeysAndValues(
            self.num_attention_heads, self.num_key_value_heads, self.head_dim,
            self.sliding_windows[index],
        )  # fmt: skip

    def layer_shape(self, index: int) -> LayerShape:
        """The matrices and the cache of a layer; for families of other layers to override."""
        heads, hidden, inner = self.heads(index), self.hidden_size, self.intermediate_size
        matrices = (*attention_matrices(hidden, heads), *gated_matrices(hidden, inner))
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        others = 2 * hidden + 2 * heads.head_dim * self.qk_norm  # norms
        others += num_heads * heads.head_dim * self.qkv_bias + hidden * self.o_bias
        others += (2 * inner + hidden) * self.mlp_bias
        return LayerShape(heads, matrices, others, {"intermediate_size": inner})

    @property
    def longest_window(self) -> int | None:
        """The largest window of all layers; None if some layer attends to all tokens.

        It is 0 if no layer keeps keys and values of tokens.
        """
        caches = (cache for layer in self.layers for cache in layer.cache.each)
        windows = [cache.window for cache in caches if isinstance(cache, TokenCache)]
        known = [window for window in windows if window is not None]
        return max(known, default=0) if len(known) == len(windows) else None

    @property
    def max_context(self) -> int:
        """The longest context that the model supports, including its rope scaling."""
        if self.rope_parameters["rope_type"] == "default":
            return self.max_position_embeddings
        from nanovllm.models.rope import max_rope_positions

        return max_rope_positions(self.rope_parameters, self.max_position_embeddings)

    @property
    def sizes(self) -> str:
        """The sizes that decide how large the model is, for error messages."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "head_dim")  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def check_parallel_size(self, size: int, whole_experts: bool = False) -> None:
        """Raise a ValueError if `size` ranks cannot split this model, or cannot import its family.

        With `whole_experts`, the ranks split the list of experts instead of each expert.
        """
        if size > 1 or whole_experts:
            from nanovllm.models.split import check_split

            check_split(self.layers, size, whole_experts)
        if size > 1 and self.architecture in registered:
            from nanovllm.models.outside import check_importable

            check_importable(self.architecture)

    def _check_caches(self) -> None:
        """Raise a ValueError if the engine has no cache for what a layer keeps."""
        for cache in {cache for layer in self.layers for cache in layer.cache.each}:
            if not isinstance(cache, (TokenCache, State)):
                raise ValueError(f"layers that keep {type(cache).__name__} are not supported")

    def _refuse_huge(self) -> None:
        """Raise a ValueError if the largest matrices are too large for any memory."""
        largest = max(
            size_out * size_in * (layer.experts.total if layer.experts and is_experts else 1)
            for layer in self.layers
            for _, size_out, size_in, is_experts in layer.matrices
        )
        if self.hidden_size * self.vocab_size + largest > MAX_PARAMETERS:
            raise ValueError(f"no memory holds a matrix of the model's sizes: {self.sizes}")


def _quantization(
    file: Mapping[str, Any], option: str | None, names: Names
) -> "Quantization | None":
    """How the weights are quantized. The readers are loaded only if they are."""
    if option is None and not is_quantized(file):
        return None
    from nanovllm.formats.methods import choose_quantization

    return choose_quantization(file, option, names)


def _architecture_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if "draft_vocab_size" in raw or "Eagle3" in str(names):
        raise ValueError('this is an EAGLE-3 head; its method in speculative_config is "eagle3"')
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"architectures must be a list of one model class, got {shorten(names)}")
    name, known = str(names[0]), architectures()
    # A decoder alone may name its own class as architecture.
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return whole if name.endswith("Model") and whole in known else name
