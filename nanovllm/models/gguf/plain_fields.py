"""The fields of families with LayerNorm, or with a feed-forward part without a gate.

The files have fused projections and matrices in the usual order, whatever the converter has read.
"""

import math
from collections.abc import Callable
from typing import Any

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.names import ROPE_FACTORS

Config = dict[str, Any]
USUAL_ORDER = {"usual_order": True}  # for families whose own files have another one


def _epsilon(metadata: Metadata) -> float:
    epsilon: float = metadata.number("attention.layer_norm_epsilon")
    return epsilon


def _has(metadata: Metadata, tensor: str) -> bool:
    return f"blk.0.{tensor}" in metadata.model.tensors


def _rotated(metadata: Metadata) -> Config:
    """The rotated part of each head, also if it is all: the families' defaults are other parts."""
    size = metadata.size("embedding_length") // metadata.number_of_heads()
    head_dim = metadata.size("attention.key_length", size)
    return {"partial_rotary_factor": metadata.size("rope.dimension_count", head_dim) / head_dim}


def _gptneox(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": _epsilon(metadata), "hidden_act": "gelu",
        "use_parallel_residual": metadata.get("use_parallel_residual", True),
        "attention_bias": _has(metadata, "attn_qkv.bias"), **_rotated(metadata), **USUAL_ORDER,
    }  # fmt: skip


def _gpt2(metadata: Metadata) -> Config:
    return {
        "layer_norm_epsilon": _epsilon(metadata), "activation_function": "gelu_new",
        "n_inner": metadata.size("feed_forward_length"), **USUAL_ORDER,
    }  # fmt: skip


def _phi2(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": _epsilon(metadata), "hidden_act": "gelu_new", "qk_layernorm": False,
        **_rotated(metadata),
    }  # fmt: skip


def _stablelm(metadata: Metadata) -> Config:
    """The converter may write that blocks are parallel where they are not; the norms tell."""
    metadata.get("use_parallel_residual", None)
    return {
        "layer_norm_eps": _epsilon(metadata),
        "use_parallel_residual": not _has(metadata, "ffn_norm.weight"),
        "use_qkv_bias": _has(metadata, "attn_q.bias"),
        "qk_layernorm": _has(metadata, "attn_q_norm.weight"),
        **_rotated(metadata),
    }


def _starcoder2(metadata: Metadata) -> Config:
    """The converter leaves out the window."""
    metadata.only("attention.sliding_window", (0,))
    return {
        "norm_epsilon": _epsilon(metadata), "hidden_act": "gelu_pytorch_tanh",
        "use_bias": _has(metadata, "attn_q.bias"), "sliding_window": None,
    }  # fmt: skip


def _nemotron(metadata: Metadata) -> Config:
    return {
        "norm_eps": _epsilon(metadata), "hidden_act": "relu2", **_rotated(metadata),
        "attention_bias": _has(metadata, "attn_q.bias"), "mlp_bias": _has(metadata, "ffn_up.bias"),
    }  # fmt: skip


def _falcon(metadata: Metadata) -> Config:
    """All blocks are parallel."""
    heads, kv_heads = metadata.number_of_heads(), metadata.number_of_heads("head_count_kv")
    return {
        "layer_norm_epsilon": _epsilon(metadata), "activation": "gelu", "num_kv_heads": kv_heads,
        "ffn_hidden_size": metadata.size("feed_forward_length"), "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 1 + _has(metadata, "attn_norm_2.weight"),
        "bias": _has(metadata, "attn_qkv.bias"), **USUAL_ORDER,
    }  # fmt: skip


def _arcee(metadata: Metadata) -> Config:
    return {
        "hidden_act": "relu2", "attention_bias": _has(metadata, "attn_q.bias"),
        "mlp_bias": _has(metadata, "ffn_up.bias"),
    }  # fmt: skip


def _apertus(metadata: Metadata) -> Config:
    """The constants of xIELU are known; its parameters become tensors (`numbers`)."""
    for key, usual in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        value = metadata.get(key, usual)
        if not isinstance(value, float) or not math.isclose(value, usual, rel_tol=0.01):
            raise metadata.wrong(key, value, str(usual))
    numbers(metadata)
    fields = {"hidden_act": "xielu", "attention_bias": _has(metadata, "attn_q.bias")}
    has_factors = ROPE_FACTORS in metadata.model.tensors
    # A config without parameters of the rotation would have those of the family.
    return fields if has_factors else fields | {"rope_parameters": {"rope_type": "default"}}


def numbers(metadata: Metadata) -> dict[str, float]:
    """The parameters that are no tensors in files, by their usual names."""
    if metadata.architecture != "apertus":
        return {}
    return {
        f"model.layers.{index}.mlp.act_fn.{name}": number
        for name in ("alpha_p", "alpha_n")
        for index, number in enumerate(metadata.of_layers(f"xielu.{name}"))
    }


PLAIN_FAMILIES: dict[str, Callable[[Metadata], Config]] = {
    "gptneox": _gptneox, "gpt2": _gpt2, "phi2": _phi2, "stablelm": _stablelm,
    "starcoder2": _starcoder2, "nemotron": _nemotron, "falcon": _falcon, "arcee": _arcee,
    "apertus": _apertus,
}  # fmt: skip
