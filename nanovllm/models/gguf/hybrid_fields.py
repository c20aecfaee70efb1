"""The fields of families with states in some layers, from a GGUF file's metadata."""

from collections.abc import Callable

from nanovllm.models.gguf.dense_fields import DENSE
from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config
from nanovllm.models.layer_kinds import LINEAR
from nanovllm.models.windows import FULL

CONV = "conv"
SIGMOID = 2  # a gating function


def _lfm2(metadata: Metadata) -> Config:
    """The converter adjusts the intermediate size. Layers without key heads have convolutions."""
    kv_heads = metadata.of_each("attention.head_count_kv")
    return {
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.size("shortconv.l_cache"), "conv_bias": False,
        "layer_types": [FULL if heads else CONV for heads in kv_heads],
    }  # fmt: skip


def _lfm2moe(metadata: Metadata) -> Config:
    """The shares of a token's experts add up to 1: files do not say it."""
    metadata.only("expert_gating_func", (SIGMOID,))
    metadata.only("expert_weights_norm", (True,))
    metadata.only("expert_weights_scale", (0.0, 1.0))
    dense = metadata.get("leading_dense_block_count", 0)
    return _lfm2(metadata) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in metadata.model.tensors,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    }  # fmt: skip


def _has(metadata: Metadata, tensor: str) -> bool:
    """Whether some layer has a tensor."""
    return any(name.endswith(f".{tensor}") for name in metadata.model.tensors)


def _space(metadata: Metadata, names: Config) -> Config:
    """The sizes of state spaces, by the `names` of the family's fields."""
    heads = metadata.size("ssm.time_step_rank")
    sizes = {
        "heads": heads, "head_dim": metadata.size("ssm.inner_size") // heads,
        "groups": metadata.size("ssm.group_count", 1), "state": metadata.size("ssm.state_size"),
        "width": metadata.size("ssm.conv_kernel"),
        "conv_bias": _has(metadata, "ssm_conv1d.bias"), "bias": _has(metadata, "ssm_in.bias"),
    }  # fmt: skip
    return {name: sizes[ours] for ours, name in names.items()}


def _expansion(metadata: Metadata) -> float:
    """The channels of all heads, as a multiple of the hidden size."""
    ratio: float = metadata.size("ssm.inner_size") / metadata.size("embedding_length")
    return int(ratio) if ratio.is_integer() else ratio


OF_MAMBA2 = {
    "heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "state": "state_size",
    "width": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias",
}  # fmt: skip
OF_MAMBA = {
    "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups",
    "state": "mamba_d_state", "width": "mamba_d_conv", "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}  # fmt: skip
OF_NEMOTRON = OF_MAMBA2 | {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
}


def _mamba2(metadata: Metadata) -> Config:
    return _space(metadata, OF_MAMBA2) | {
        "expand": _expansion(metadata),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _attending(metadata: Metadata) -> list[bool]:
    """The layers with attention."""
    return [heads > 0 for heads in metadata.of_each("attention.head_count_kv")]


def _granitehybrid(metadata: Metadata) -> Config:
    """Nothing is rotated. Without experts, only the part that all tokens use is there."""
    metadata.only("rope.scaling.finetuned", (False,))
    metadata.only("expert_gating_func", (1,))
    experts = metadata.get("expert_count", 0)
    per_token = metadata.get("expert_used_count", 0)
    whole = metadata.size("feed_forward_length")
    return DENSE["granite"](metadata) | _space(metadata, OF_MAMBA) | {
        "model_type": "granitemoehybrid",
        "layer_types": [FULL if attends else LINEAR for attends in _attending(metadata)],
        "attention_bias": _has(metadata, "attn_q.bias"), "position_embedding_type": "nope",
        "mamba_expand": _expansion(metadata), "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "shared_intermediate_size": metadata.size("expert_shared_feed_forward_length", whole),
    }  # fmt: skip


def _falcon_h1(metadata: Metadata) -> Config:
    """The converter multiplies all factors into the weights. Gates come before norms."""
    return _space(metadata, OF_MAMBA) | {
        "model_type": "falcon_h1", "mamba_d_ssm": metadata.size("ssm.inner_size"),
        "mamba_rms_norm": _has(metadata, "ssm_norm.weight"), "mamba_norm_before_gate": False,
        "projectors_bias": _has(metadata, "ssm_out.bias"),
        "attention_bias": _has(metadata, "attn_q.bias"),
        "mlp_bias": _has(metadata, "ffn_gate.bias"),
    }  # fmt: skip


def _nemotron_h(metadata: Metadata) -> Config:
    """A layer has attention, or a feed-forward part, or else a state space."""
    inner = metadata.of_each("feed_forward_length")
    feeds = "moe" if metadata.architecture == "nemotron_h_moe" else "mlp"
    kinds = [
        FULL if attends else feeds if size else LINEAR
        for attends, size in zip(_attending(metadata), inner, strict=True)
    ]
    return _space(metadata, OF_NEMOTRON) | {
        "model_type": "nemotron_h", "layers_block_type": kinds[: metadata.num_layers],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2", "mlp_bias": _has(metadata, "ffn_up.bias"),
    }  # fmt: skip


def _nemotron_h_moe(metadata: Metadata) -> Config:
    metadata.only("expert_gating_func", (SIGMOID,))
    metadata.only("expert_shared_count", (1,))
    return _nemotron_h(metadata) | {
        "mlp_bias": _has(metadata, "ffn_up_shexp.bias"),
        "n_routed_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
        "moe_latent_size": metadata.size("moe_latent_size", None),
    }  # fmt: skip


def _qwen35(metadata: Metadata) -> Config:
    """The layers with queries have attention. Positions of text have one dimension."""
    metadata.ignore("full_attention_interval", "rope.dimension_sections")
    heads, tensors = metadata.size("ssm.time_step_rank"), metadata.model.tensors
    attending = (f"blk.{i}.attn_q.weight" in tensors for i in range(metadata.num_layers))
    return {
        "model_type": "qwen3_5_text", "attention_bias": _has(metadata, "attn_q.bias"),
        "layer_types": [FULL if attends else LINEAR for attends in attending],
        "linear_num_key_heads": metadata.size("ssm.group_count"),
        "linear_num_value_heads": heads, "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": metadata.size("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }  # fmt: skip


def _qwen35moe(metadata: Metadata) -> Config:
    """The shares of a token's experts add up to 1: files do not say it."""
    for key, allowed in (
        ("expert_gating_func", (1,)), ("expert_weights_norm", (True,)),
        ("expert_weights_scale", (0.0, 1.0)), ("expert_shared_count", (0, 1)),
        ("leading_dense_block_count", (0,)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return _qwen35(metadata) | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
    }


HYBRIDS: dict[str, Callable[[Metadata], Config]] = {
    "lfm2": _lfm2, "lfm2moe": _lfm2moe, "mamba2": _mamba2, "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1, "nemotron_h": _nemotron_h, "nemotron_h_moe": _nemotron_h_moe,
    "qwen35": _qwen35, "qwen35moe": _qwen35moe, "qwen3next": _qwen35moe,
}  # fmt: skip
