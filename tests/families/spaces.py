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
        elif name.endswith("_proj.bias"):
            param.mul_(0.2)  # or the model says always the same
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)


ADAPTERS = "all but out_proj"
MAMBA2 = "Mamba2ForCausalLM"
OWN_SHAPE = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
     "rms_norm_eps", "attention_bias")
)  # fmt: skip
GRANITE = "GraniteMoeHybridForCausalLM"
IN_GRANITE = dict(
    head_dim=None, num_hidden_layers=3, shared_intermediate_size=40, mamba_n_heads=4,
    mamba_d_state=16, embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.4,
    attention_multiplier=0.1,
)  # fmt: skip
FALCON = "FalconH1ForCausalLM"
IN_FALCON = dict(num_hidden_layers=2)
FACTORS: dict[str, Any] = dict(
    embedding_multiplier=3.0, lm_head_multiplier=0.7, key_multiplier=0.6,
    attention_in_multiplier=0.8, attention_out_multiplier=1.3, ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.7, ssm_multipliers=[0.9, 1.3, 0.7, 1.2, 0.8], mlp_multipliers=[0.7, 1.4],
)  # fmt: skip
NEMOTRON = "NemotronHForCausalLM"
IN_NEMOTRON = dict(
    num_hidden_layers=None, rms_norm_eps=None, mamba_num_heads=8, ssm_state_size=16,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=40, routed_scaling_factor=1.7,
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
    "Granite 4": Sample(
        GRANITE,
        dict(
            IN_GRANITE, num_local_experts=6, num_experts_per_tok=2, intermediate_size=24,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        adjust=remember,
    ),
    "Granite 4, dense": Sample(
        GRANITE,
        dict(
            IN_GRANITE, num_hidden_layers=2, layer_types=["full_attention", "linear_attention"],
            num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=72,
            position_embedding_type="nope", attention_bias=True, mamba_n_groups=2,
            tie_word_embeddings=True, mamba_d_conv=2,
        ),
        adjust=remember,
    ),
    "Granite 4, attention alone": Sample(
        GRANITE,
        dict(
            IN_GRANITE, num_hidden_layers=2, layer_types=["full_attention"] * 2,
            num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope",
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "Falcon-H1": Sample(
        FALCON,
        dict(
            IN_FALCON, mamba_d_ssm=48, mamba_n_heads=6, mamba_n_groups=1, mamba_d_state=16,
            **FACTORS,
        ),
        adjust=remember, adapters=ADAPTERS,
    ),
    "Falcon-H1, normed": Sample(
        FALCON,
        dict(
            IN_FALCON, num_key_value_heads=1, mamba_d_ssm=None, mamba_n_heads=8, mamba_n_groups=2,
            mamba_d_state=24, mamba_d_conv=3, mamba_rms_norm=True,
            attention_bias=True, mlp_bias=True, projectors_bias=True, mamba_proj_bias=True,
            **FACTORS | dict(ssm_in_multiplier=0.6),
        ),
        adjust=remember,
        padded=False,
        refuses={"adapters": "PEFT's batch is padded"},
    ),
    "Nemotron-H": Sample(
        NEMOTRON,
        dict(IN_NEMOTRON, hybrid_override_pattern="M-*M-", mamba_head_dim=12, n_groups=2),
        adjust=remember, adapters=ADAPTERS,
    ),
    "Nemotron 3": Sample(
        NEMOTRON,
        dict(
            IN_NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            mamba_num_heads=6, mamba_head_dim=16, n_groups=1, **EXPERTS,
        ),
        adjust=remember, adapters=ADAPTERS,
    ),
    "Nemotron 3, latent": Sample(
        NEMOTRON,
        dict(
            IN_NEMOTRON, layers_block_type=["moe", "linear_attention", "full_attention"],
            mamba_num_heads=4, mamba_head_dim=8, n_groups=2, use_conv_bias=False, n_group=2,
            topk_group=1, moe_latent_size=20, mlp_bias=True, norm_topk_prob=False, **EXPERTS,
        ),
        adjust=remember, adapters="latent",
    ),
    "Falcon-H1, gate first": Sample(
        FALCON,
        dict(
            IN_FALCON, num_hidden_layers=1, mamba_d_ssm=96, mamba_n_heads=4, mamba_n_groups=1,
            mamba_d_state=16, mamba_rms_norm=True, mamba_norm_before_gate=False,
            mamba_conv_bias=False, tie_word_embeddings=True,
        ),
        adjust=remember, adapters=ADAPTERS,
    ),
}  # fmt: skip
SPARSE = [
    name for name, sample in SAMPLES.items() if {*sample.fields} & {"n_routed_experts"}
    or sample.fields.get("num_local_experts")
]  # fmt: skip

# The numbers of parameters are those of transformers' models, made on the meta device.
MAMBA2_FILE: dict[str, Any] = {
    "architectures": [MAMBA2], "model_type": "mamba2", "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64,
    "hidden_act": "silu", "layer_norm_epsilon": 1e-05, "norm_before_gate": True,
    "num_hidden_layers": 64, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
}  # fmt: skip
GRANITE_FILE: dict[str, Any] = {
    "architectures": [GRANITE], "model_type": "granitemoehybrid", "attention_bias": False,
    "embedding_multiplier": 12, "eos_token_id": 100_257, "hidden_act": "silu",
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False,
    "max_position_embeddings": 131_072, "num_hidden_layers": 40, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10_000, "tie_word_embeddings": True, "vocab_size": 100_352,
}  # fmt: skip
FALCON_FILE: dict[str, Any] = {
    "architectures": [FALCON], "model_type": "falcon_h1", "attention_bias": False,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "eos_token_id": 11,
    "embedding_multiplier": 5.656854249492381, "hidden_act": "silu",
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_conv_bias": True,
    "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
    "mamba_use_mlp": True, "max_position_embeddings": 16_384, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "projectors_bias": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100_000_000_000.0,
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_FILE: dict[str, Any] = {
    "architectures": [NEMOTRON], "model_type": "nemotron_h", "attention_bias": False,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32,
    "residual_in_fp32": False, "sliding_window": None, "ssm_state_size": 128,
    "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "vocab_size": 131_072,
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
    "granite-4.0-h-micro": Published(
        GRANITE_FILE
        | dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, mamba_n_heads=64,
               num_local_experts=0, num_experts_per_tok=0, intermediate_size=8192,
               shared_intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8),
        3_191_396_096,
    ),
    "granite-4.0-h-tiny": Published(
        GRANITE_FILE
        | dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48,
               num_local_experts=64, num_experts_per_tok=6, intermediate_size=512,
               shared_intermediate_size=1024, attention_multiplier=0.0078125, logits_scaling=6),
        6_939_037_248,
    ),
    "granite-4.0-h-small": Published(
        GRANITE_FILE
        | dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, mamba_n_heads=128,
               num_local_experts=72, num_experts_per_tok=10, intermediate_size=768,
               shared_intermediate_size=1536, attention_multiplier=0.0078125, logits_scaling=16),
        32_207_337_984,
    ),
    "granite-4.0-micro": Published(
        GRANITE_FILE
        | dict(hidden_size=2560, num_attention_heads=40, num_key_value_heads=8, mamba_n_heads=80,
               num_local_experts=0, num_experts_per_tok=0, intermediate_size=8192,
               shared_intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=10,
               layer_types=["attention"] * 40, position_embedding_type="rope",
               rope_theta=10_000_000),
        3_402_836_480,
    ),
    "Falcon-H1-0.5B": Published(
        FALCON_FILE
        | dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=36,
               num_attention_heads=8, num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536,
               mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128, vocab_size=32_784),
        521_411_104,
    ),
    "Falcon-H1-7B": Published(
        FALCON_FILE
        | dict(hidden_size=3072, intermediate_size=12_288, num_hidden_layers=44,
               num_attention_heads=12, num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072,
               mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, vocab_size=130_048),
        7_585_513_568,
    ),
    "Nemotron-H-8B": Published(
        NEMOTRON_FILE
        | dict(hidden_size=4096, intermediate_size=21_504, num_hidden_layers=52,
               num_key_value_heads=8, mamba_num_heads=128,
               hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        8_100_852_736,
    ),
    # transformers does not count the biases of routers: 128 in each of 23 layers.
    "Nemotron-3-Nano-30B-A3B": Published(
        NEMOTRON_FILE
        | dict(hidden_size=2688, intermediate_size=1856, num_hidden_layers=52,
               num_key_value_heads=2, mamba_num_heads=64, n_routed_experts=128,
               n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=1856,
               moe_shared_expert_intermediate_size=3712, n_group=1, topk_group=1,
               norm_topk_prob=True, routed_scaling_factor=2.5,
               hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        31_577_937_344 + 128 * 23,
    ),
}  # fmt: skip
