"""The fields of families with latent attention, from a GGUF file's metadata.

Files of DeepSeek's architecture say how experts are chosen, and not of which family they are.
"""

from collections.abc import Callable

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config

SOFTMAX, SIGMOID = 1, 2  # gating functions
# Of DeepSeek V3 and R1. Files may leave out the number of groups, and how many are chosen.
V3_EXPERTS, V3_GROUPS = 256, (8, 4)


def latent_heads(metadata: Metadata) -> Config:
    """The heads: new files describe the latent rows, as keys of one head, and the heads apart."""
    rotated, rank = metadata.size("rope.dimension_count"), metadata.size("attention.kv_lora_rank")
    hidden, heads = metadata.size("embedding_length"), metadata.number_of_heads()
    if (key := metadata.size("attention.key_length_mla", None)) is not None:
        metadata.only("attention.head_count_kv", (1,))
        metadata.only("attention.key_length", (rank + rotated,))
        metadata.only("attention.value_length", (rank,))
        value = metadata.size("attention.value_length_mla")
    else:
        metadata.only("attention.head_count_kv", (heads,))
        key = metadata.size("attention.key_length")
        value = metadata.size("attention.value_length", hidden // heads)
    if key <= rotated:
        raise metadata.wrong("rope.dimension_count", rotated, f"less than {key}, the keys' size")
    return {
        "num_key_value_heads": heads, "head_dim": rotated, "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated, "v_head_dim": value, "kv_lora_rank": rank,
        "q_lora_rank": metadata.size("attention.q_lora_rank", None),
    }  # fmt: skip


def _deepseek2(metadata: Metadata) -> Config:
    """V3 and its like choose by sigmoids, V2 by a softmax; without experts it is Youtu-LLM."""
    if not metadata.get("expert_count", 0):
        metadata.ignore("leading_dense_block_count", "expert_feed_forward_length")
        metadata.only("expert_shared_count", (0,))
        return {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    kind = metadata.get("expert_gating_func", SOFTMAX)
    metadata.only("expert_gating_func", (SOFTMAX, SIGMOID))
    experts = metadata.size("expert_count")
    says_groups = metadata.get("expert_group_count", None) is not None
    is_v3 = (kind, experts) == (SIGMOID, V3_EXPERTS)
    usual = V3_GROUPS if is_v3 and not says_groups else (1, 1)
    groups = metadata.size("expert_group_count", usual[0])
    config = {
        "n_routed_experts": experts,
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": groups, "topk_group": metadata.size("expert_group_used_count", usual[1]),
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    if kind == SIGMOID:
        names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return config | names
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return config | {"model_type": "deepseek_v2", "topk_method": method}


def _minicpm3(metadata: Metadata) -> Config:  # noqa: ARG001
    """The factors are those of MiniCPM3-4B: files do not say them."""
    return {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


LATENT: dict[str, Callable[[Metadata], Config]] = {"deepseek2": _deepseek2, "minicpm3": _minicpm3}
