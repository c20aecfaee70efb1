"""Ministral 3: Mistral with queries that grow with the position, past the trained length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields
from nanovllm.utils.checks import check_float, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
    "rope_theta": 1_000_000.0, "eos_token_id": 2,
}  # fmt: skip
# Of files without rope parameters.
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0,
    "original_max_position_embeddings": 16_384, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True, **EVERY_LAYER}
SCALE, LENGTH = "llama_4_scaling_beta", "max_position_embeddings"  # not of the rope itself
SPELLINGS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(ModelConfig):
    """Queries at position p are multiplied by 1 + `query_growth` * log(1 + p // trained_length)."""

    query_growth: float

    @property
    def trained_length(self) -> int:
        """The number of positions whose queries do not grow."""
        length = self.rope_parameters.get("original_max_position_embeddings")
        return int(length or self.max_position_embeddings)


def read(file: Mapping[str, Any]) -> Ministral3Config:
    """If there is a window, all layers have it."""
    file, growth = without_growth(file, YARN, DEFAULTS)
    fields = Fields(file, DEFAULTS, FIXED)
    check_activation(fields)
    return Ministral3Config(**decoder_fields(fields), query_growth=growth)


def without_growth(
    file: Mapping[str, Any], rope: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], float]:
    """A file without what its rope parameters say of queries, and how these grow.

    A file without rope parameters has those of `rope`.
    """
    if not any(file.get(name) for name in SPELLINGS):
        file = {**file, SPELLINGS[0]: rope}
    given = {name: {**file[name]} for name in SPELLINGS if isinstance(file.get(name), Mapping)}
    growths = {each.pop(SCALE, None) for each in given.values()}
    if len(growths) > 1:
        raise ValueError(f"{SCALE} differs in rope_scaling and rope_parameters")
    longest = file.get(LENGTH, defaults[LENGTH])
    for each in given.values():
        if (length := each.pop(LENGTH, None)) not in (None, longest):
            raise ValueError(f"{LENGTH}={longest} and {shorten(length)} of the rope differ")
    growth = growths.pop() if growths else None
    return {**file, **given}, 0.0 if growth is None else check_float(SCALE, growth, 0.0)


def build(config: Ministral3Config, make: "Build") -> "CausalLM":
    """Llama, with factors of queries if sequences can be longer than the trained length."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.query_growth import GROWTH, GrowingQueries, QueryGrowth
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    trained = config.trained_length
    if not config.query_growth or make.max_positions <= trained:
        return parts.usual_model(config, make)

    def block(index: int, make: "Build") -> Block:
        return Block(
            make,
            parts.pre_norms(config),
            parts.attention(config, index, make.inside("self_attn"), GrowingQueries),
            parts.mlp(config, make.inside("mlp")),
        )

    growth = QueryGrowth(config.query_growth, trained, make.max_positions)
    ropes = {ROPE: parts.rope(config, make), GROWTH: growth}
    embedding, blocks = parts.embedding(config, make), parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build)
