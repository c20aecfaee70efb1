"""MiniCPM3: dense, with latent attention and factors of embeddings, sums and logits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.latents import LatentConfig, latent_decoder, latent_fields

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 73_448, "hidden_size": 2560, "intermediate_size": 6400,
    "num_hidden_layers": 62, "num_attention_heads": 40, "kv_lora_rank": 256, "q_lora_rank": 768,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    """With the factors of embeddings, of what is added to residuals, and of logits."""

    embedding_scale: float
    residual_scale: float
    logit_scale: float


def read(file: Mapping[str, Any]) -> MiniCPM3Config:
    """A `scale_depth`, `dim_model_base` or `v_head_dim` of null stands for what changes nothing."""
    fields = latent_fields(file, DEFAULTS)
    if fields["v_head_dim"] is None:
        fields["v_head_dim"] = fields.size("hidden_size") // fields.size("num_attention_heads")
    decoder = latent_decoder(fields, interleaved=False)
    depth = math.sqrt(decoder["num_hidden_layers"])
    return MiniCPM3Config(
        **decoder,
        mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=fields.number("scale_emb"),
        residual_scale=_or(fields, "scale_depth", depth) / depth,
        logit_scale=_or(fields, "dim_model_base", fields["hidden_size"]) / fields["hidden_size"],
    )


def _or(fields: Fields, name: str, default: float) -> float:
    return default if fields[name] is None else fields.number(name)


def build(config: MiniCPM3Config, make: "Build") -> "CausalLM":
    """Granite's form, with latent attention."""
    from nanovllm.layers.mixer import ROPE
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder
    from nanovllm.models.latent_parts import latent_block

    embedding = parts.embedding(config, make, config.embedding_scale)
    block = latent_block(config, residual_scale=config.residual_scale)
    blocks, ropes = parts.blocks(config, make, block), {ROPE: parts.rope(config, make)}
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding, scale=config.logit_scale))


FAMILY = Family(read, build)
