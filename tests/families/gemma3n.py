"""Gemma 3n: several streams of hidden states, per-layer embeddings, shared keys, sparse gates."""

from typing import Any

from families.describe import Published, Sample

FULL, SLIDING = "full_attention", "sliding_attention"
TEXT: dict[str, Any] = dict(
    num_hidden_layers=5, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING], sliding_window=21,
    num_kv_shared_layers=2, vocab_size_per_layer_input=200, hidden_size_per_layer_input=10,
    laurel_rank=6, altup_num_inputs=3, altup_active_idx=1, tie_word_embeddings=True, pad_token_id=0,
    intermediate_size=[96, 90, 64, 96, 80], activation_sparsity_pattern=[0.8, 0.0, 0.6, 0.0, 0.9],
)  # fmt: skip


SAMPLES = {
    "Gemma 3n": Sample("Gemma3nForCausalLM", TEXT),
    "Gemma 3n unshared": Sample(
        "Gemma3nForCausalLM",
        TEXT
        | dict(
            num_hidden_layers=3,
            layer_types=None,
            intermediate_size=96,
            altup_active_idx=0,
            activation_sparsity_pattern=None,
            num_kv_shared_layers=0,
            altup_correct_scale=False,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
}


def published(layers: int, inner: int, num_shared: int) -> dict[str, Any]:
    """A file as Google published it, with a frequency for each type of layers."""
    text = dict(
        vocab_size=262_400, hidden_size=2048, intermediate_size=[inner] * layers, head_dim=256,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        num_kv_shared_layers=num_shared, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0,
        rope_scaling=None, activation_sparsity_pattern=[0.95] * 10 + [0.0] * (layers - 10),
        layer_types=([SLIDING] * 4 + [FULL]) * (layers // 5), max_position_embeddings=32_768,
        vocab_size_per_layer_input=262_144, hidden_size_per_layer_input=256, laurel_rank=64,
        altup_num_inputs=4, sliding_window=512, final_logit_softcapping=30.0, rms_norm_eps=1e-6,
    )  # fmt: skip
    return dict(
        architectures=["Gemma3nForConditionalGeneration"], torch_dtype="bfloat16",
        eos_token_id=[1, 106], text_config=text,
    )  # fmt: skip


PUBLISHED = {
    "Gemma 3n E2B": Published(published(30, 8192, 10), 4_435_182_688),
    "Gemma 3n E4B": Published(published(35, 16_384, 15), 6_835_235_568),
}
