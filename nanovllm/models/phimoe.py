"""Phi-3.5-MoE: experts in all layers, LayerNorm, and biases of attention and of the head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import HEAD, Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import ExpertsConfig, SparseConfig, all_layers, sparse_mlp
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields
from nanovllm.models.mixtral import EXPERTS
from nanovllm.models.rope import SPELLINGS, TRAINED_LENGTH
from nanovllm.models.shapes import LayerShape
from nanovllm.utils.checks import check_float, check_int

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_064, "hidden_size": 4096, "intermediate_size": 6400,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "eos_token_id": 2, "num_experts_per_tok": 2, "num_local_experts": 16, "lm_head_bias": False,
    "router_jitter_noise": 0.01,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True, **EVERY_LAYER}
SCALES = ("short_mscale", "long_mscale")  # of cosines and sines, by the length of contexts


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(SparseConfig):
    """With a bias of the head, and the factors of cosines and sines of longrope."""

    head_bias: bool
    rope_scales: tuple[float, float] | None  # up to the trained length, and above it

    def layer_shape(self, index: int) -> LayerShape:
        """Norms have biases. Those of the last norm and of the head count in the last layer."""
        shape, biases = super().layer_shape(index), 2 * self.hidden_size
        if index == self.num_hidden_layers - 1:
            biases += self.hidden_size + self.vocab_size * (self.head_bias and self.has_head)
        return replace(shape, num_others=shape.num_others + biases)


def read(file: Mapping[str, Any]) -> PhimoeConfig:
    """Two experts a token, by SparseMixer. If there is a window, all layers have it."""
    plain, scales = _without_scales(file)
    fields = Fields(plain, DEFAULTS, FIXED)
    check_activation(fields)
    decoder = decoder_fields(fields)
    is_longrope = decoder["rope_parameters"]["rope_type"] == "longrope"
    num_experts = check_int("num_local_experts", fields["num_local_experts"], 2)
    per_token = check_int("num_experts_per_tok", fields["num_experts_per_tok"], 2, 2)
    margin = 2 * check_float("router_jitter_noise", fields["router_jitter_noise"], 0.0)
    routing = Routing(per_token=per_token, normalized=False, scores="sparse mixer", margin=margin)
    if fields.flag("lm_head_bias") and fields.flag("tie_word_embeddings"):
        raise ValueError("lm_head_bias with tie_word_embeddings is not supported")
    return PhimoeConfig(
        **decoder,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        head_bias=fields.flag("lm_head_bias"),
        rope_scales=_checked(scales) if is_longrope else None,
        experts=ExpertsConfig(
            num_experts,
            fields.size("intermediate_size"),
            routing,
            all_layers(fields),
            size_name="intermediate_size",
        ),
    )


def _without_scales(file: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields without longrope's factors of cosines and sines, and these."""
    found, plain = dict[str, Any](), dict(file)
    for spelling in SPELLINGS:
        if isinstance(given := file.get(spelling), dict):
            found |= {name: given[name] for name in SCALES if name in given}
            plain[spelling] = {n: value for n, value in given.items() if n not in SCALES}
    return plain, found


def _checked(scales: Mapping[str, Any]) -> tuple[float, float]:
    if missing := [name for name in SCALES if name not in scales]:
        raise ValueError(f"rope_type 'longrope' needs a {missing[0]}")
    short, long = (check_float(name, scales[name], 0.0, above=True) for name in SCALES)
    return short, long


def build(config: PhimoeConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.biased_head import BiasedHead
    from nanovllm.layers.block import Block, pre_norms
    from nanovllm.layers.layer_norm import LayerNorm
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.rotary_embedding import get_rope
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def norm() -> LayerNorm:
        return LayerNorm(config.hidden_size, config.rms_norm_eps)

    def block(index: int, make: "Build") -> Block:
        attention = parts.attention(config, index, make.inside("self_attn"))
        return Block(
            make, pre_norms(norm(), norm()), attention, sparse_mlp(config, make.inside("mlp"))
        )

    rope = get_rope(
        config.head_dim, make.max_positions, config.max_position_embeddings,
        _rope_parameters(config, make.max_positions),
    )  # fmt: skip
    embedding = parts.embedding(config, make)
    decoder = Decoder(make, embedding, parts.blocks(config, make, block), norm(), {ROPE: rope})
    if not (config.head_bias and config.has_head):
        return CausalLM(make, decoder, parts.head(config, make, embedding))
    head_format, sizes = make.formats.of(HEAD), (config.vocab_size, config.hidden_size)
    return CausalLM(make, decoder, BiasedHead(*sizes, make.ranks, head_format))


def _rope_parameters(config: PhimoeConfig, max_positions: int) -> dict[str, Any]:
    """The rope parameters for contexts up to `max_positions`, which choose the factors."""
    parameters = dict(config.rope_parameters)
    if config.rope_scales is not None:
        trained = parameters.get(TRAINED_LENGTH) or config.max_position_embeddings
        parameters["attention_factor"] = config.rope_scales[max_positions > trained]
    return parameters


# The names in the files are Mixtral's. transformers' modules have a name of their own for routers.
PIECES = {"router": "gate", "block_sparse_moe.gate": "mlp.gate", "block_sparse_moe": "mlp"}
FAMILY = Family(read, build, Names(experts=EXPERTS, pieces=PIECES))
