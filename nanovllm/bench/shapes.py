"""Shapes of published models: a config.json for each, to run with random weights."""

import json
from pathlib import Path
from typing import Any

# hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied
SHAPES = {
    "qwen3-42m": (512, 1536, 8, 8, 4, 64, 32_000, True),  # small enough for two CPU cores
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151_936, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151_936, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 128, 151_936, False),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128_256, False),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, 152_064, False),
}
# Differences in the config.json of shapes other than dense Qwen3.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "llama-3-8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=500_000,
        max_position_embeddings=8192, rms_norm_eps=1e-5,
    ),
    "qwen2.5-7b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=32_768
    ),
}  # fmt: skip


HEAD_TOKENS = 32_000  # the most tokens of a head's vocabulary


def write_shape(name: str, path: Path, is_head: bool = False) -> str:
    """Write a shape's `config.json` into the directory `path`, and return the path.

    If `is_head`, write that of an EAGLE-3 head for a model of this shape.
    """
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab_size, tied = SHAPES[name]
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu",
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=vocab_size, tie_word_embeddings=tied, max_position_embeddings=40_960,
        rms_norm_eps=1e-6, rope_theta=1_000_000, attention_bias=False, torch_dtype="bfloat16",
    ) | OTHERS.get(name, {})  # fmt: skip
    if is_head:
        config |= dict(
            architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1,
            draft_vocab_size=min(HEAD_TOKENS, vocab_size),
        )  # fmt: skip
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(path)
