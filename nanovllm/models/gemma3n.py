"""Gemma 3n, text only: E2B, E4B."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.layers.sizes import AltUpSizes
from nanovllm.models.family import Family
from nanovllm.models.shapes import LayerShape, MatrixShape, gated_matrices
from nanovllm.models.shared_layers import SharedConfig, layer_types, shared_fields
from nanovllm.models.typed_ropes import typed_ropes
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_bool, check_float, check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
    "attention_bias": False, "rope_parameters": None, "layer_types": None, "sliding_window": 512,
    "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}  # fmt: skip
# The frequencies of each type of layers, by the names and with the values of old files.
THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
MAX_STREAMS = 64
NUM_SPARSE, SPARSITY = 10, 0.95  # the first layers, if the file does not say which


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedConfig):
    """`inner_sizes` has the intermediate size of each layer, `sparsity` its share of zeros."""

    inner_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    altup: AltUpSizes
    laurel_rank: int

    def layer_shape(self, index: int) -> LayerShape:
        """With six norms of hidden states, and the scale of AltUp; layer 0 has its projections."""
        hidden, inner, num = self.hidden_size, self.inner_sizes[index], self.altup.num_streams
        ends = [
            f"altup{which}_projections.{i}" for which in ("", "_unembed") for i in range(num - 1)
        ]
        matrices = (
            *self.attention_matrices(index), *gated_matrices(hidden, inner),
            *self.per_layer_matrices(),
            MatrixShape("laurel.linear_left", self.laurel_rank, hidden),
            MatrixShape("laurel.linear_right", hidden, self.laurel_rank),
            MatrixShape("altup.correction_coefs", num, num),
            MatrixShape("altup.prediction_coefs", num * num, num),
            MatrixShape("altup.modality_router", num, hidden),
            *(MatrixShape(name, hidden, hidden) for name in ends if index == 0),
        )  # fmt: skip
        others = 7 * hidden + self.num_attention_others(index) + self.num_per_layer_others(index)
        return LayerShape(self.heads(index), matrices, others, {"intermediate_size": inner})


def read(file: Mapping[str, Any]) -> Gemma3nConfig:
    """Lists with a value for each layer must have as many as there are layers."""
    raw = {**DEFAULTS, **file}
    types = layer_types(raw, every=5)
    num, given = len(types), ropes(raw)
    inner = for_each(raw, "intermediate_size", num)
    inner_sizes = tuple(check_int("intermediate_size", size, 1) for size in inner)
    shared = shared_fields({**file, "intermediate_size": max(inner_sizes)}, DEFAULTS, types)
    if shared["per_layer"] is None:
        raise ValueError("hidden_size_per_layer_input must be >= 1, got 0")
    name = "activation_sparsity_pattern"
    if raw[name] is None:
        first = NUM_SPARSE if num > NUM_SPARSE else 0
        raw[name] = [SPARSITY] * first + [0.0] * (num - first)
    streams = check_int("altup_num_inputs", raw["altup_num_inputs"], 1, MAX_STREAMS)
    return Gemma3nConfig(
        **shared,
        ropes=typed_ropes(given, {}, dict.fromkeys(types, shared["head_dim"])),
        inner_sizes=inner_sizes,
        sparsity=tuple(check_float(name, share, 0.0, 0.999) for share in for_each(raw, name, num)),
        altup=AltUpSizes(
            streams,
            check_int("altup_active_idx", raw["altup_active_idx"], 0, streams - 1),
            check_bool("altup_correct_scale", raw["altup_correct_scale"]),
        ),
        laurel_rank=check_int("laurel_rank", raw["laurel_rank"], 1),
    )


def for_each(raw: Mapping[str, Any], name: str, num_layers: int) -> list[Any]:
    """A field's value for each layer; a value that is not a list is that of all layers."""
    value = raw[name] if isinstance(raw[name], list) else [raw[name]] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"{name} must have {num_layers} values, got {shorten(raw[name])}")
    return value


def ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters by types of layers; old files have a frequency for each type."""
    if raw.get("rope_scaling") is not None:
        raise ValueError(f"rope_scaling must be null, got {shorten(raw['rope_scaling'])}")
    given = {} if raw["rope_parameters"] is None else raw["rope_parameters"]
    if not isinstance(given, Mapping) or not all(
        isinstance(given.get(k, {}), Mapping) for k in THETAS
    ):
        raise TypeError(f"rope_parameters must be objects by type, got {shorten(given)}")
    thetas = {
        kind: {"rope_theta": check_float(theta[0], raw.get(*theta), 1.0, above=True)}
        for kind, theta in THETAS.items()
    }
    return {kind: {**thetas[kind], **given.get(kind, {})} for kind in THETAS}


def build(config: Gemma3nConfig, make: "Build") -> "CausalLM":
    """Blocks that compute one of several streams; some are sparse, and some share keys."""
    from nanovllm.layers.altup import AltUp, AltUpBlock, Laurel
    from nanovllm.layers.feed_forward import MLP
    from nanovllm.layers.gelu import GeluTanhAndMul
    from nanovllm.layers.norm_places import sandwich_norms
    from nanovllm.layers.sparse_gelu import SparseGeluAndMul
    from nanovllm.models import parts
    from nanovllm.models.altup_decoder import AltUpDecoder
    from nanovllm.models.shared_parts import SharedAttentions, shared_model

    attentions, hidden, eps = SharedAttentions(config), config.hidden_size, config.rms_norm_eps

    def mlp(index: int, make: "Build") -> MLP:
        inner, share = config.inner_sizes[index], config.sparsity[index]
        sparse = partial(SparseGeluAndMul, share, inner, make.ranks)
        return MLP(make, hidden, inner, activation=sparse if share else GeluTanhAndMul)

    def block(index: int, make: "Build") -> AltUpBlock:
        norms = sandwich_norms(*(parts.norm(config) for _ in range(4)))
        attention = attentions.make(index, make.inside("self_attn"))
        feed_forward = mlp(index, make.inside("mlp"))
        return AltUpBlock(
            make, hidden, eps, norms, attention, feed_forward, config.per_layer,
            altup=AltUp(make.inside("altup"), hidden, eps, config.altup),
            laurel=Laurel(make.inside("laurel"), hidden, eps, config.laurel_rank),
        )  # fmt: skip

    decoder = partial(AltUpDecoder, num_streams=config.altup.num_streams)
    return shared_model(config, make, block, decoder)


FAMILY = Family(read, build)
