"""GPT-NeoX 20B, Pythia, Dolly 2, RedPajama: parallel blocks of LayerNorms, partly rotated heads."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.buffer_names import BufferNames
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.grouped_heads import grouped_model
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.spellings import errors_spell, partly_rotated, respelt

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_432, "hidden_size": 6144, "intermediate_size": 24_576,
    "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_act": "gelu",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "eos_token_id": 2,
    "attention_bias": True, "use_parallel_residual": True,
}  # fmt: skip
EPSILON = {"layer_norm_eps": "rms_norm_eps"}
ROTATION = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
FIXED: Mapping[str, Any] = {"num_key_value_heads": None, "head_dim": None, **NO_WINDOW}
NAMES = BufferNames(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    stores_fused=True,
    prefixes={"gpt_neox.": "model.", "embed_out.": "lm_head."},
    pieces={
        "embed_in": "embed_tokens", "final_layer_norm": "norm",
        "attention.query_key_value": "self_attn.qkv_proj", "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    buffers=(".attention.bias", ".attention.masked_bias"),
)  # fmt: skip


@errors_spell({**EPSILON, **ROTATION})
def read(file: Mapping[str, Any]) -> PlainConfig:
    """The oldest files spell the fields of the rotation in other ways."""
    file = partly_rotated(respelt(respelt(file, EPSILON), ROTATION, both=True), 0.25)
    fields = Fields(file, respelt(DEFAULTS, EPSILON), FIXED)
    bias = fields.flag("attention_bias")
    return PlainConfig(
        **decoder_fields(fields, partial_rotary=True),
        activation=activation(fields),
        parallel=fields.flag("use_parallel_residual"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        num_outside=fields["hidden_size"],
        usual_order="usual_order" in file,
    )


FAMILY = Family(read, grouped_model, NAMES)
