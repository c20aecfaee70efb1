"""Families with LayerNorm, feed-forward parts without a gate, and parallel blocks."""

from typing import Any

from families.describe import Published, Sample

# Fields of SHAPE that these families do not have.
NO_HEADS: dict[str, Any] = dict(num_key_value_heads=None, head_dim=None, rms_norm_eps=None)
LAST = ("final_layer_norm.bias", "ln_f.bias", "final_layernorm.bias", "model.norm.bias", "head.bias")


def quieten(model: Any) -> None:
    """Make biases smaller, above all those behind the last block: outputs would be nearly theirs."""
    for name, param in model.named_parameters():
        if name.endswith(LAST):
            param.mul_(0.1)
        elif name.endswith("bias"):
            param.mul_(0.2)


NEOX: dict[str, Any] = dict(NO_HEADS, attention_bias=None)

SAMPLES = {
    "GPT-NeoX": Sample("GPTNeoXForCausalLM", NEOX, adjust=quieten),
    "GPT-NeoX, sequential": Sample(
        "GPTNeoXForCausalLM",
        dict(
            NEOX, use_parallel_residual=False, rotary_pct=0.5, rotary_emb_base=1000, hidden_size=48,
            hidden_act="gelu_new", attention_bias=False, tie_word_embeddings=True,
        ),
        adjust=quieten,
    ),
}  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "pythia-70m": Published(
        dict(
            architectures=["GPTNeoXForCausalLM"], hidden_size=512, intermediate_size=2048,
            num_hidden_layers=6, num_attention_heads=8, vocab_size=50304, hidden_act="gelu",
            max_position_embeddings=2048, rotary_pct=0.25, rotary_emb_base=10000,
            layer_norm_eps=1e-5, use_parallel_residual=True, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0, torch_dtype="float16",
        ),
        70_426_624,
    ),
    "pythia-1.4b": Published(
        dict(
            architectures=["GPTNeoXForCausalLM"], hidden_size=2048, intermediate_size=8192,
            num_hidden_layers=24, num_attention_heads=16, vocab_size=50304, hidden_act="gelu",
            max_position_embeddings=2048, rotary_pct=0.25, rotary_emb_base=10000,
            layer_norm_eps=1e-5, use_parallel_residual=True, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0, torch_dtype="float16",
        ),
        1_414_647_808,
    ),
}  # fmt: skip
