"""Falcon 7B, 40B, 180B, and Falcon 2: parallel blocks, few key heads, fused projections."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.grouped_heads import grouped_model
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.utils.checks import check_int

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None,
    "alibi": False, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
    "bias": False, "max_position_embeddings": 2048, "eos_token_id": 11, "ffn_hidden_size": None,
    "activation": "gelu", "tie_word_embeddings": True,
}  # fmt: skip
OWN = {
    "layer_norm_epsilon": "rms_norm_eps", "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip
OLD = {"n_embed": "hidden_size"}
FIXED: Mapping[str, Any] = {"head_dim": None, **NO_WINDOW}
NAMES = Names(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    stores_fused=True,
    prefixes={"transformer.": "model."},
    pieces={
        "word_embeddings": "embed_tokens", "h": "layers", "ln_f": "norm",
        "ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm",
        "self_attention.query_key_value": "self_attn.qkv_proj",
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj",
    },
)  # fmt: skip


@errors_spell({**OWN, **OLD})
def read(file: Mapping[str, Any]) -> PlainConfig:
    """`new_decoder_architecture` is that of 40B: groups of heads, and a norm for each part."""
    file = respelt(respelt(file, OWN), OLD, both=True)
    fields = Fields(file, respelt(DEFAULTS, OWN), FIXED)
    if fields.flag("alibi"):
        raise ValueError("alibi=True: biases of scores by distance are not supported")
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * fields.size("hidden_size")
    bias, is_new = fields.flag("bias"), fields.flag("new_decoder_architecture")
    fields["num_key_value_heads"] = _num_kv_heads(fields, is_new)
    parallel = fields.flag("parallel_attn")
    if is_new and not parallel:
        raise ValueError("new_decoder_architecture=True and parallel_attn=False exclude each other")
    return PlainConfig(
        **decoder_fields(fields),
        activation=activation(fields, "activation"),
        parallel=parallel,
        own_norm=_num_norms(fields, is_new, parallel) == 2,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_outside=fields["hidden_size"],
        usual_order="usual_order" in file,
    )


def _num_kv_heads(fields: Fields, is_new: bool) -> int:
    """The key heads: those that the file says in the new architecture, else one, or all."""
    num_heads, given = fields.size("num_attention_heads"), fields["num_key_value_heads"]
    if not is_new and fields.flag("multi_query"):
        return 1
    number = num_heads if given is None else check_int("num_kv_heads", given, 1)
    if not is_new and number != num_heads:
        raise ValueError(
            f"num_kv_heads={number} without multi_query and new_decoder_architecture must be"
            f" num_attention_heads={num_heads}"
        )
    return number


def _num_norms(fields: Fields, is_new: bool, parallel: bool) -> int:
    """The norms of a block."""
    usual = 2 if is_new or not parallel else 1
    given = fields["num_ln_in_parallel_attn"]
    number = usual if given is None else check_int("num_ln_in_parallel_attn", given, 1, 2)
    if parallel and number > usual:
        raise ValueError("num_ln_in_parallel_attn=2 needs new_decoder_architecture=True")
    return number


FAMILY = Family(read, grouped_model, NAMES)
