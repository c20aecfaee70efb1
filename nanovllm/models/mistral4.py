"""Mistral 4: latent attention with queries that grow with the position, and experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import expert_groups, layers_after_dense
from nanovllm.models.family import Family
from nanovllm.models.latents import (
    SparseLatentConfig,
    is_interleaved,
    latent_decoder,
    latent_experts,
    latent_fields,
    routed,
)
from nanovllm.models.ministral3 import SPELLINGS, without_growth
from nanovllm.models.sigmoid_experts import SPELLING
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.utils.checks import check_float, check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "max_position_embeddings": 1_048_576,
    "rope_interleave": True, "eos_token_id": 2,
}  # fmt: skip
# Of files without rope parameters.
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "beta_fast": 32.0,
    "original_max_position_embeddings": 8192, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
PART = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(SparseLatentConfig):
    """Queries at position p are multiplied by 1 + `query_growth` * log(1 + p // trained_length)."""

    query_growth: float

    @property
    def trained_length(self) -> int:
        """The number of positions whose queries do not grow."""
        length = self.rope_parameters.get("original_max_position_embeddings")
        return int(length or self.max_position_embeddings)


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> Mistral4Config:
    """Every layer after the first dense ones has experts."""
    file, growth = without_growth(file, YARN, DEFAULTS)
    file = respelt(_with_whole_rotation(file), SPELLING, both=True)
    fields = latent_fields(file, DEFAULTS)
    num_experts, per_token = routed(fields)
    routing = Routing(
        per_token=per_token,
        normalized=fields.flag("norm_topk_prob"),
        groups=expert_groups(fields, num_experts),
        scale=fields.number("routed_scaling_factor"),
    )
    return Mistral4Config(
        **latent_decoder(fields, interleaved=is_interleaved(fields)),
        experts=latent_experts(fields, routing, layers_after_dense(fields)),
        query_growth=growth,
    )


def _with_whole_rotation(file: Mapping[str, Any]) -> dict[str, Any]:
    """The file without the rotated part of a head: the sizes of the parts say it.

    At the top level it may also be 1, for the rotated part alone.
    """
    sizes = {**DEFAULTS, **file}
    rotated, plain = (
        check_int(f"qk_{kind}_head_dim", sizes[f"qk_{kind}_head_dim"], 1)
        for kind in ("rope", "nope")
    )
    given = {name: {**file[name]} for name in SPELLINGS if isinstance(file.get(name), Mapping)}
    top = None if file.get(PART) == 1.0 else file.get(PART)
    parts = (top, *(rope.pop(PART, None) for rope in given.values()))
    for part in (each for each in parts if each is not None):
        if int((rotated + plain) * check_float(PART, part, 0.0, 1.0)) != rotated:
            raise ValueError(
                f"{PART}={shorten(part)} of qk_nope_head_dim={plain} and qk_rope_head_dim={rotated}"
                " together is not the latter"
            )
    return {n: value for n, value in file.items() if n != PART} | given


def build(config: Mistral4Config, make: "Build") -> "CausalLM":
    """Compose it with factors of queries, if sequences can be longer than the trained length."""
    from nanovllm.layers.latent_attention import GrowingLatentAttention
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.query_growth import GROWTH, QueryGrowth
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder
    from nanovllm.models.latent_parts import latent_block, latent_model

    trained = config.trained_length
    if not config.query_growth or make.max_positions <= trained:
        return latent_model(config, make)
    growth = QueryGrowth(config.query_growth, trained, make.max_positions)
    ropes = {ROPE: parts.rope(config, make), GROWTH: growth}
    blocks = parts.blocks(config, make, latent_block(config, GrowingLatentAttention))
    embedding = parts.embedding(config, make)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build)
