"""Configs of models in which some layers read the keys and values of an earlier layer.

Layers of each type (with a window, or without one) have a rope of their own, and each layer may
read a part of a second embedding of the tokens. No PyTorch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.shared_cache import SharedKeysAndValues
from nanovllm.layers.sizes import PerLayer
from nanovllm.models.config import MAX_PARAMETERS, ModelConfig
from nanovllm.models.fields import MAX_LAYERS, Fields, check_activation, decoder_fields
from nanovllm.models.shapes import MatrixShape, attention_matrices
from nanovllm.models.windows import FULL, LAYER_TYPES, SLIDING
from nanovllm.utils.checks import check_int, shorten

# Of a shared layer, which has no such tensors; files may have them.
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")


@dataclass(frozen=True, kw_only=True)
class SharedConfig(ModelConfig):
    """`lenders` has, for each layer, the layer that it has its keys and values from, or None."""

    layer_types: tuple[str, ...]
    lenders: tuple[int | None, ...]
    ropes: Mapping[str, Mapping[str, Any]]  # by types of layers
    per_layer: PerLayer | None
    soft_cap: float | None  # of logits

    def own_heads(self, index: int) -> KeysAndValues:
        """The heads of a layer, if it keeps its keys and values or not."""
        return super().heads(index)

    def heads(self, index: int) -> KeysAndValues:
        heads = self.own_heads(index)
        if self.lenders[index] is None:
            return heads
        return SharedKeysAndValues(*heads.heads, heads.window)

    def lends(self, index: int) -> bool:
        """Whether other layers read the keys and values of a layer."""
        return index in self.lenders

    def attention_matrices(self, index: int) -> tuple[MatrixShape, ...]:
        """The matrices of a layer's attention; a layer without keys has only two."""
        matrices = attention_matrices(self.hidden_size, self.own_heads(index))
        return matrices if self.lenders[index] is None else (matrices[0], matrices[-1])

    def num_attention_others(self, index: int) -> int:
        """The parameters of the norms of heads, and of biases."""
        has_keys = self.lenders[index] is None
        biases = sum(matrix.size_out for matrix in self.attention_matrices(index))
        return (1 + has_keys) * self.own_heads(index).head_dim + self.qkv_bias * biases

    def per_layer_matrices(self) -> tuple[MatrixShape, ...]:
        """Those of a layer's part of the second embedding, with its share of the projection."""
        if self.per_layer is None:
            return ()
        size, hidden = self.per_layer.size, self.hidden_size
        return (
            MatrixShape("per_layer_input_gate", size, hidden),
            MatrixShape("per_layer_projection", hidden, size),
            MatrixShape("per_layer_model_projection", size, hidden),
        )

    def num_per_layer_others(self, index: int) -> int:
        """The norm of a layer's part, and its columns of the table; layer 0 has the last norm."""
        if self.per_layer is None:
            return 0
        num_rows, size = self.per_layer
        return self.hidden_size + num_rows * size + (size if index == 0 else 0)


def shared_fields(
    file: Mapping[str, Any], defaults: Mapping[str, Any], types: Sequence[str]
) -> dict[str, Any]:
    """The fields of every such config except `ropes`, by our names."""
    own = ("layer_types", "rope_parameters", "sliding_window")
    fields = Fields({n: v for n, v in file.items() if n not in own}, defaults)
    check_activation(fields, "gelu_pytorch_tanh", "hidden_activation")
    raw = {**defaults, **file}
    bias, cap = fields.flag("attention_bias"), "final_logit_softcapping"
    decoder = decoder_fields(fields) | {"sliding_windows": windows(raw, types)}
    size = check_int("hidden_size_per_layer_input", raw["hidden_size_per_layer_input"] or 0, 0)
    per_layer = PerLayer(fields.size("vocab_size_per_layer_input"), size) if size else None
    if per_layer and per_layer.vocab_size * size * len(types) > MAX_PARAMETERS:
        raise ValueError(
            f"no memory holds a table of vocab_size_per_layer_input={per_layer.vocab_size} and"
            f" hidden_size_per_layer_input={size}"
        )
    return dict(
        **decoder, qkv_bias=bias, o_bias=bias, layer_types=types, lenders=lenders(raw, types),
        per_layer=per_layer, soft_cap=None if fields[cap] is None else fields.number(cap),
    )  # fmt: skip


def layer_types(raw: Mapping[str, Any], every: int, last_is_full: bool = False) -> tuple[str, ...]:
    """The type of each layer; if absent, each layer number `every` attends to all tokens."""
    num_layers = check_int("num_hidden_layers", raw["num_hidden_layers"], 1, MAX_LAYERS)
    given = raw["layer_types"]
    if given is None:
        given = [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(f"layer_types must have {num_layers} entries, got {shorten(given)}")
    if unknown := [kind for kind in given if kind not in LAYER_TYPES]:
        allowed = ", ".join(LAYER_TYPES)
        raise ValueError(f"layer_types {shorten(unknown)} are not supported; {allowed} are")
    return (*given[:-1], FULL if last_is_full else given[-1])


def windows(raw: Mapping[str, Any], types: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer."""
    window = check_int("sliding_window", raw["sliding_window"], 1)
    return tuple(window if kind == SLIDING else None for kind in types)


def lenders(raw: Mapping[str, Any], types: Sequence[str]) -> tuple[int | None, ...]:
    """For each layer the layer that it has its keys and values from; None: it has its own.

    The last `num_kv_shared_layers` layers read those of the last layer of their type before them.
    """
    name, num_layers = "num_kv_shared_layers", len(types)
    num_own = num_layers - check_int(name, raw[name], 0, num_layers - 1)
    last = {kind: index for index, kind in enumerate(types[:num_own])}
    if num_own < num_layers and set(last) != set(types):
        missing = ", ".join(sorted(set(types) - set(last)))
        raise ValueError(
            f"{name}={raw[name]}: no layer before the shared ones has {missing} (layer_types)"
        )
    return tuple(None if index < num_own else last[types[index]] for index in range(num_layers))


def unused_names(shared: Sequence[int | None], names: Names) -> tuple[str, ...]:
    """The beginnings of the names of tensors that shared layers do not use, for `Names.skipped`."""
    return tuple(
        f"{names.theirs(f'model.layers.{index}.self_attn')}.{name}."
        for index, lender in enumerate(shared)
        if lender is not None
        for name in UNUSED
    )
