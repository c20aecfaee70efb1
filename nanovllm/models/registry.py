"""The architectures that nanovllm runs, by the name that checkpoints give them.

All of them share one decoder (`decoder.py`); this file lists how each one differs. It is plain
data: no PyTorch, no transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from the common decoder, and its defaults for `config.json`.

    A bias is True, False, or the name of the field that decides it. `defaults` holds transformers'
    values for absent fields, where they differ from `DEFAULTS`; a field that is absent in all is
    an error. `fixed` overrides the file: transformers does not read these fields for this
    architecture.
    """

    qk_norm: bool = False  # a norm on each query and key head, before they are rotated
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False  # checkpoints have qkv_proj and gate_up_proj, not their parts
    experts: bool = False  # some or all feed-forward layers are experts
    partial_rotary: bool = False  # the config may limit the rotation to a part of each head
    unrotated_layers: bool = False  # the config says which layers do not rotate
    rope_types: Mapping[str, str] = field(default_factory=dict)  # present names of old types
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# A checkpoint's module, the layer of ours that it is a part of, and its place there.
FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# What most of transformers' config classes give to fields that a file leaves out.
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0,
    "layer_types": None, "eos_token_id": None,
}  # fmt: skip
EVERY_LAYER = {"max_window_layers": 0, "layer_types": None}  # if there is a window, all have it
QWEN: Mapping[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 32_768, "sliding_window": 4096,
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults={**QWEN, "head_dim": 128, "max_window_layers": 28},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        experts=True,
        defaults={
            **QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        fixed=EVERY_LAYER,
    ),
    # Up to Qwen2.5.
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, defaults={**QWEN, "max_window_layers": 28}),
    # Llama 2 to 3.3, and other models published under this name: SmolLM2, TinyLlama, Yi, the R1
    # distillations into Llama. The oldest files lack the fields that later ones introduced.
    "LlamaForCausalLM": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
            "eos_token_id": 2,
        },
        fixed={"use_sliding_window": False, "layer_types": None},
    ),
    # With `layer_types` transformers 5 loads this name as Ministral: only some layers have windows.
    "MistralForCausalLM": Architecture(
        defaults={
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131_072, "sliding_window": 4096, "eos_token_id": 2,
        },
        fixed={"use_sliding_window": True, "max_window_layers": 0},
    ),
    # Every fourth layer rotates nothing, unless `no_rope_layers` says otherwise.
    "SmolLM3ForCausalLM": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        unrotated_layers=True,
        defaults={
            "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0, "no_rope_layers": None,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True, "eos_token_id": 128_001,
        },
    ),
    # Phi 3, 3.5 and 4, text only. Their checkpoints store qkv_proj and gate_up_proj fused.
    "Phi3ForCausalLM": Architecture(
        fused=True,
        partial_rotary=True,
        rope_types={"su": "longrope", "yarn": "longrope"},
        defaults={
            "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "eos_token_id": 32_000,
        },
        fixed={"use_sliding_window": True, **EVERY_LAYER},
    ),
}  # fmt: skip


def get_architecture(name: object) -> Architecture:
    """The architecture `name`. An unknown one is a ValueError; no similar one takes its place."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture {name!r} is not supported; architectures: one of {known}")
    return ARCHITECTURES[name]
