"""A family from outside of the package, of Gemma's form: used by test_strangers.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.layers.block import Block
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.gelu import GeluTanhAndMul
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import SelfAttention
from nanovllm.layers.norm_places import sandwich_norms
from nanovllm.layers.plus_one_norm import PlusOneRMSNorm
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models import parts
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM, Decoder
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape


@dataclass(frozen=True, kw_only=True)
class SandwichConfig(ModelConfig):
    """With the fields that Llama's decoder has not."""

    local_theta: float
    query_scalar: float
    soft_cap: float
    score_cap: float | None
    local_heads: tuple[int, int, int]  # of layers with a window: of queries, of keys, their size

    def heads(self, index: int) -> KeysAndValues:
        """Layers with a window have heads of their own."""
        heads = super().heads(index)
        return KeysAndValues(*self.local_heads, heads.window) if heads.window else heads

    def layer_shape(self, index: int) -> LayerShape:
        """Four norms of hidden states, and two of heads."""
        others = 4 * self.hidden_size + 2 * self.heads(index).head_dim
        needs = frozenset({"soft_cap"} if self.score_cap is not None else ())
        return replace(super().layer_shape(index), num_others=others, needs=needs)


def read(file: Mapping[str, Any]) -> SandwichConfig:
    fields = Fields(file, {"attn_logit_softcapping": None}, fixed={"use_sliding_window": True})
    check_activation(fields, "gelu_pytorch_tanh")
    has_cap = fields["attn_logit_softcapping"] is not None
    return SandwichConfig(
        **decoder_fields(fields),
        local_theta=fields.number("local_theta", 1.0),
        query_scalar=fields.number("query_scalar"),
        soft_cap=fields.number("final_logit_softcapping"),
        score_cap=fields.number("attn_logit_softcapping") if has_cap else None,
        local_heads=(
            fields.size("swa_num_attention_heads"),
            fields.size("swa_num_key_value_heads"),
            fields.size("swa_head_dim"),
        ),
    )


def build(config: SandwichConfig, make: Build) -> CausalLM:
    hidden = config.hidden_size

    def norm(size: int = hidden) -> PlusOneRMSNorm:
        return PlusOneRMSNorm(size, config.rms_norm_eps)

    def block(index: int, make: Build) -> Block:
        heads = config.heads(index)
        norms = norm(heads.head_dim), norm(heads.head_dim)
        attention = SelfAttention(
            make.inside("self_attn"), hidden, heads, rope="local" if heads.window else "global",
            head_norms=norms, scale=config.query_scalar**-0.5, soft_cap=config.score_cap,
        )  # fmt: skip
        mlp = MLP(make.inside("mlp"), hidden, config.intermediate_size, activation=GeluTanhAndMul)
        return Block(make, sandwich_norms(norm(), norm(), norm(), norm()), attention, mlp)

    def rope(theta: float, dim: int) -> Any:
        parameters = {"rope_type": "default", "rope_theta": theta}
        return get_rope(dim, make.max_positions, config.max_position_embeddings, parameters)

    ropes = {
        "global": rope(config.rope_parameters["rope_theta"], config.head_dim),
        "local": rope(config.local_theta, config.local_heads[2]),
    }
    embedding = VocabParallelEmbedding(config.vocab_size, hidden, make.ranks, scale=hidden**0.5)
    decoder = Decoder(make, embedding, parts.blocks(config, make, block), norm(), ropes)
    head = parts.head(config, make, embedding, soft_cap=config.soft_cap)
    return CausalLM(make, decoder, head)


NAMES = Names(prefixes={"model.language_model.": "model."}, skipped=("model.visual.",))
FAMILY = Family(read, build, NAMES)
