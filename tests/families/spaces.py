"""Families with state spaces: alone, beside attention, and in one block with it."""

from typing import Any

from families.describe import Published, Sample


def remember(model: Any) -> None:
    """States that last for a few tokens or for many, and time steps of all sizes."""
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            param.uniform_(-5.0, 0.5)
        elif name.endswith("dt_bias"):
            param.uniform_(-3.0, 0.5)
        elif name.endswith("conv1d.weight"):
            param.normal_(0.0, 0.4)


ADAPTERS = "all but out_proj"
MAMBA2 = "Mamba2ForCausalLM"
OWN_SHAPE = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
     "rms_norm_eps", "attention_bias")
)  # fmt: skip
SMALL = dict(OWN_SHAPE, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=16, n_groups=2)
SAMPLES = {
    "Mamba 2": Sample(MAMBA2, SMALL, adjust=remember, adapters=ADAPTERS),
    "Mamba 2, one group": Sample(
        MAMBA2,
        dict(
            SMALL, hidden_size=40, num_heads=10, head_dim=12, expand=3, state_size=24, n_groups=1,
            conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=True,
            chunk_size=16,
        ),
        adjust=remember,
        padded=False,  # its biases make the padding's inputs of the convolution other than zeros
        refuses={"adapters": "PEFT's batch is padded"},
    ),
}  # fmt: skip
# The numbers of parameters are those of transformers' models, made on the meta device.
MAMBA2_FILE: dict[str, Any] = {
    "architectures": [MAMBA2], "model_type": "mamba2", "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64,
    "hidden_act": "silu", "layer_norm_epsilon": 1e-05, "norm_before_gate": True,
    "num_hidden_layers": 64, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
}  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "mamba2-2.7b": Published(
        MAMBA2_FILE
        | dict(hidden_size=2560, num_heads=80, n_groups=1, vocab_size=50_288,
               tie_word_embeddings=True),
        2_702_599_680,
    ),
    "Codestral Mamba 7B": Published(
        MAMBA2_FILE
        | dict(hidden_size=4096, num_heads=128, n_groups=8, vocab_size=32_768,
               tie_word_embeddings=False),
        7_285_403_648,
    ),
}  # fmt: skip
