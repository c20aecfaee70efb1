"""The fields of families with experts, except Qwen3's, from a GGUF file's metadata.

The files do not say whether the shares of a token's experts add up to 1: each family decides it.
"""

from collections.abc import Callable

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config, attention_bias, has, window

SIGMOID = 2  # a gating function


def _experts(metadata: Metadata, normalized: bool, name: str = "num_experts") -> Config:
    """The number of experts, by its `name` in the config, and of those of a token.

    Other routers than a softmax over all experts, or over the chosen, are refused.
    """
    for key, allowed in (
        ("expert_weights_norm", (normalized,)), ("expert_weights_scale", (0.0, 1.0)),
        ("expert_gating_func", (1,)), ("leading_dense_block_count", (0,)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return {
        name: metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }


def _same_width(metadata: Metadata) -> None:
    """For families with one intermediate size, and without shared experts."""
    metadata.only("expert_shared_count", (0,))
    metadata.only("expert_shared_feed_forward_length", (0,))
    metadata.only("expert_feed_forward_length", (metadata.size("feed_forward_length"),))


def mixtral(metadata: Metadata) -> Config:
    """Files of Llama's architecture with experts."""
    _same_width(metadata)
    names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return names | _experts(metadata, True, "num_local_experts")


def _qwen2moe(metadata: Metadata) -> Config:
    """Old files have no sizes of experts: the intermediate size is that of a token's experts."""
    experts, whole = _experts(metadata, normalized=False), metadata.size("feed_forward_length")
    per_expert = whole // experts["num_experts_per_tok"]
    metadata.only("expert_shared_count", (0, 1))
    metadata.only("attention.sliding_window", (0,))
    return experts | {
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", per_expert),
        "shared_expert_intermediate_size": metadata.size(
            "expert_shared_feed_forward_length", whole
        ),
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "qkv_bias": "blk.0.attn_q.bias" in metadata.model.tensors, "use_sliding_window": False,
    }  # fmt: skip


def _olmoe(metadata: Metadata) -> Config:
    _same_width(metadata)
    return {"norm_topk_prob": False, "clip_qkv": None, **_experts(metadata, normalized=False)}


def _granitemoe(metadata: Metadata) -> Config:
    """Factors that a file leaves out change nothing."""
    _same_width(metadata)
    usual = metadata.size("attention.key_length", 0) or (
        metadata.size("embedding_length") // metadata.number_of_heads()
    )
    return {
        **attention_bias(metadata),
        "attention_multiplier": metadata.number("attention.scale", usual**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        **_experts(metadata, True, "num_local_experts"),
    }


def _gpt_oss(metadata: Metadata) -> Config:
    """Windows in every other layer, a softmax over the chosen experts: files do not say it."""
    metadata.only("expert_gating_func", (3,))
    metadata.only("attention.sliding_window_pattern", (2,))
    return {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "experts_in_turn": False,
        **attention_bias(metadata),
    }


def _phimoe(metadata: Metadata) -> Config:
    """Experts are chosen by SparseMixer, in layers with LayerNorm: files do not say it."""
    _same_width(metadata)
    return {
        **attention_bias(metadata),
        "lm_head_bias": "output.bias" in metadata.model.tensors,
        "sliding_window": window(metadata),
        **_experts(metadata, False, "num_local_experts"),
    }


def _sigmoid_experts(metadata: Metadata) -> Config:
    """Experts chosen by sigmoids and a bias, in all layers after the first ones."""
    metadata.only("expert_gating_func", (SIGMOID,))
    inner, shared = (
        metadata.size("expert_feed_forward_length"),
        metadata.size("expert_shared_count"),
    )
    metadata.only("expert_shared_feed_forward_length", (shared * inner,))
    return {
        "n_routed_experts": metadata.size("expert_count"), "n_shared_experts": shared,
        "num_experts_per_tok": metadata.size("expert_used_count"), "moe_intermediate_size": inner,
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.get("expert_weights_norm"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
        **attention_bias(metadata),
    }  # fmt: skip


def _glm4moe(metadata: Metadata) -> Config:
    """The rotation's fields have the rotated part, if it is not all of a head."""
    return {
        "use_qk_norm": has(metadata, "attn_q_norm.weight"), "partial_rotary_factor": 1.0,
        **_sigmoid_experts(metadata),
    }  # fmt: skip


def _dots1(metadata: Metadata) -> Config:
    metadata.only("attention.sliding_window", (0,))
    return {"sliding_window": None, **_sigmoid_experts(metadata)}


def _ernie4_5_moe(metadata: Metadata) -> Config:
    """The size of the shared expert that the converter computes is that of published models."""
    metadata.ignore("expert_shared_feed_forward_length")
    for key, allowed in (
        ("expert_gating_func", (1,)), ("expert_weights_norm", (True,)),
        ("expert_weights_scale", (0.0, 1.0)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return {
        "use_bias": has(metadata, "attn_q.bias"),
        "moe_num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(metadata: Metadata) -> Config:
    """All experts and the shared layer have the same size. The shares add up to 1."""
    inner = metadata.size("feed_forward_length")
    metadata.only("expert_shared_count", (1,))
    metadata.only("expert_shared_feed_forward_length", (inner,))
    metadata.only("expert_feed_forward_length", (inner,))
    return {**attention_bias(metadata), **_experts(metadata, normalized=True)}


SPARSE: dict[str, Callable[[Metadata], Config]] = {
    "glm4moe": _glm4moe, "dots1": _dots1, "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-moe": _hunyuan_moe, "qwen2moe": _qwen2moe, "olmoe": _olmoe, "granitemoe": _granitemoe,
    "gpt-oss": _gpt_oss, "phimoe": _phimoe,
}  # fmt: skip
