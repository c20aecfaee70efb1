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
PUBLISHED: dict[str, Published] = {}
