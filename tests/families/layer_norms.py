"""Families with LayerNorm, feed-forward parts without a gate, and parallel blocks."""

from typing import Any

from families.describe import Published, Sample

LAST = ("layer_norm.bias", "ln_f.bias", "layernorm.bias", "model.norm.bias", "lm_head.bias")
# Without fields of SHAPE that a family does not have.
NO_HEADS: dict[str, Any] = dict(num_key_value_heads=None, head_dim=None, rms_norm_eps=None)
NEOX: dict[str, Any] = dict(NO_HEADS, attention_bias=None)
GPT2: dict[str, Any] = dict(NEOX, intermediate_size=None, tie_word_embeddings=None)
FALCON: dict[str, Any] = dict(
    NEOX, intermediate_size=None, tie_word_embeddings=None, ffn_hidden_size=96
)


def quieten(model: Any) -> None:
    """Make biases smaller, above all those behind the last block: they would decide all outputs."""
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.mul_(0.02 if name.endswith(LAST) else 0.2)


def family(architecture: str, **fields: Any) -> Sample:
    """A model with small biases."""
    seed = fields.pop("seed", 1)
    return Sample(architecture, fields, seed=seed, adjust=quieten)


SAMPLES = {
    "GPT-NeoX": family("GPTNeoXForCausalLM", **NEOX),
    "GPT-NeoX, sequential": family(
        "GPTNeoXForCausalLM", **NEOX, use_parallel_residual=False, rotary_pct=0.5,
        rotary_emb_base=1000, hidden_act="gelu_new",
    ),
    "GPT-2": family("GPT2LMHeadModel", **GPT2),
    "GPT-2, untied, odd": family(
        "GPT2LMHeadModel", **GPT2 | dict(tie_word_embeddings=False), n_inner=72,
        activation_function="relu", scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3,
    ),
    "Phi": family("PhiForCausalLM", rms_norm_eps=None, num_key_value_heads=None),
    "Phi, norms of heads": family(
        "PhiForCausalLM", rms_norm_eps=None, qk_layernorm=True, partial_rotary_factor=0.25,
    ),
    "StableLM": family("StableLmForCausalLM", rms_norm_eps=None, num_key_value_heads=4),
    "StableLM, parallel, norms of heads": family(
        "StableLmForCausalLM", rms_norm_eps=None, use_parallel_residual=True, qk_layernorm=True,
        use_qkv_bias=True, partial_rotary_factor=0.5,
    ),
    "Starcoder2": family("Starcoder2ForCausalLM", rms_norm_eps=None, sliding_window=20),
    "Starcoder2, no biases": family(
        "Starcoder2ForCausalLM", rms_norm_eps=None, use_bias=False, hidden_act="gelu",
    ),
    "Nemotron": family("NemotronForCausalLM", rms_norm_eps=None),
    "Nemotron, biases": family(
        "NemotronForCausalLM", rms_norm_eps=None, attention_bias=True, mlp_bias=True, head_dim=24,
    ),
    "Falcon": family("FalconForCausalLM", **FALCON),
    "Falcon, new": family(
        "FalconForCausalLM", **FALCON, new_decoder_architecture=True,
        num_kv_heads=2, bias=True,
    ),
    "Falcon, new, one norm": family(
        "FalconForCausalLM", **FALCON, new_decoder_architecture=True,
        num_kv_heads=2, num_ln_in_parallel_attn=1,
    ),
    "Falcon, sequential": family(
        "FalconForCausalLM", **FALCON, parallel_attn=False,
        multi_query=False, bias=True,
    ),
    "Arcee": family("ArceeForCausalLM"),
    "Arcee, biases": family(
        "ArceeForCausalLM", attention_bias=True, mlp_bias=True, hidden_act="relu",
    ),
    "Apertus": family("ApertusForCausalLM"),
}  # fmt: skip


def pythia(hidden: int, layers: int, heads: int, count: int) -> Published:
    """A model of Pythia."""
    return Published(
        dict(
            architectures=["GPTNeoXForCausalLM"], hidden_size=hidden, intermediate_size=4 * hidden,
            num_hidden_layers=layers, num_attention_heads=heads, vocab_size=50304,
            hidden_act="gelu", max_position_embeddings=2048, rotary_pct=0.25, rotary_emb_base=10000,
            layer_norm_eps=1e-5, use_parallel_residual=True, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0, torch_dtype="float16",
        ),
        count,
    )  # fmt: skip


def gpt2(hidden: int, layers: int, heads: int, count: int) -> Published:
    """A size of GPT-2."""
    return Published(
        dict(
            architectures=["GPT2LMHeadModel"], activation_function="gelu_new", n_ctx=1024,
            n_embd=hidden, n_head=heads, n_layer=layers, n_positions=1024, vocab_size=50257,
            layer_norm_epsilon=1e-5, bos_token_id=50256, eos_token_id=50256, model_type="gpt2",
        ),
        count,
    )  # fmt: skip


def phi(hidden: int, layers: int, partial: float, count: int) -> Published:
    """Phi 1 and 2."""
    return Published(
        dict(
            architectures=["PhiForCausalLM"], hidden_size=hidden, intermediate_size=4 * hidden,
            num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=None,
            vocab_size=51200, hidden_act="gelu_new", max_position_embeddings=2048,
            layer_norm_eps=1e-5, partial_rotary_factor=partial, qk_layernorm=False,
            rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16",
        ),
        count,
    )  # fmt: skip


def starcoder2(hidden: int, layers: int, heads: int, kv_heads: int, count: int) -> Published:
    """A size of StarCoder2."""
    return Published(
        dict(
            architectures=["Starcoder2ForCausalLM"], hidden_size=hidden, vocab_size=49152,
            intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5,
            max_position_embeddings=16384, sliding_window=4096, use_bias=True, rope_theta=999999.44,
            bos_token_id=0, eos_token_id=0, mlp_type="default", norm_type="layer_norm",
        ),
        count,
    )  # fmt: skip


PUBLISHED: dict[str, Published] = {
    "pythia-70m": pythia(512, 6, 8, 70_426_624),
    "pythia-1.4b": pythia(2048, 24, 16, 1_414_647_808),
    "gpt2": gpt2(768, 12, 12, 124_439_808),
    "gpt2-medium": gpt2(1024, 24, 16, 354_823_168),
    "gpt2-large": gpt2(1280, 36, 20, 774_030_080),
    "gpt2-xl": gpt2(1600, 48, 25, 1_557_611_200),
    "phi-1": phi(2048, 24, 0.5, 1_418_270_720),
    "phi-2": phi(2560, 32, 0.4, 2_779_683_840),
    "stablelm-3b-4e1t": Published(
        dict(
            architectures=["StableLmForCausalLM"], hidden_size=2560, intermediate_size=6912,
            num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
            vocab_size=50304, hidden_act="silu", max_position_embeddings=4096, layer_norm_eps=1e-5,
            partial_rotary_factor=0.25, rope_theta=10000, use_qkv_bias=False,
            tie_word_embeddings=False, eos_token_id=0, torch_dtype="bfloat16",
        ),
        2_795_443_200,
    ),
    "starcoder2-3b": starcoder2(3072, 30, 24, 2, 3_030_371_328),
    "falcon-7b": Published(
        dict(
            architectures=["FalconForCausalLM"], alibi=False, bias=False, hidden_size=4544,
            layer_norm_epsilon=1e-5, multi_query=True, new_decoder_architecture=False,
            num_attention_heads=71, num_hidden_layers=32, parallel_attn=True, vocab_size=65024,
            eos_token_id=11, torch_dtype="bfloat16",
        ),
        6_921_720_704,
    ),
    "falcon-40b": Published(
        dict(
            architectures=["FalconForCausalLM"], alibi=False, bias=False, hidden_size=8192,
            layer_norm_epsilon=1e-5, new_decoder_architecture=True, num_attention_heads=128,
            num_hidden_layers=60, num_kv_heads=8, parallel_attn=True, vocab_size=65024,
            eos_token_id=11, torch_dtype="bfloat16",
        ),
        41_303_293_952,
    ),
    "Apertus-8B": Published(
        dict(
            architectures=["ApertusForCausalLM"], hidden_size=4096, intermediate_size=21504,
            num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            vocab_size=131072, hidden_act="xielu", max_position_embeddings=65536,
            rms_norm_eps=1e-5, qk_norm=True, post_norm=False, mlp_bias=False, attention_bias=False,
            rope_theta=12000000, tie_word_embeddings=False, torch_dtype="bfloat16",
            rope_scaling=dict(
                factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
                original_max_position_embeddings=8192, type="llama3",
            ),
        ),
        8_053_338_176,
    ),
}  # fmt: skip
