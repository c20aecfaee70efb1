"""Published models of dense families that differ from Llama in norms, ropes, windows or factors."""

from typing import Any

from families.describe import Published

FULL, SLIDING = "full_attention", "sliding_attention"
OLMO = dict(rope_theta=500_000, rms_norm_eps=1e-6, max_position_embeddings=4096,
            attention_bias=False, tie_word_embeddings=False, eos_token_id=100_257)  # fmt: skip
OLMO3 = {
    **OLMO, "sliding_window": 4096, "max_position_embeddings": 65_536, "rope_scaling": dict(
        attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
        original_max_position_embeddings=8192, rope_type="yarn",
    ),
}  # fmt: skip
GRANITE = dict(
    rope_theta=5e6, rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=True,
    attention_bias=False, mlp_bias=False, eos_token_id=0, embedding_multiplier=12.0,
    residual_multiplier=0.22,
)  # fmt: skip
MINISTRAL = dict(
    head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262_144, sliding_window=None,
    rope_parameters=dict(
        beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
        mscale_all_dim=1.0, original_max_position_embeddings=16_384, rope_theta=1e6,
        rope_type="yarn", type="yarn",
    ),
)  # fmt: skip
EXAONE = dict(
    max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1_000_000, eos_token_id=361,
    rope_scaling=dict(factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0,
                      original_max_position_embeddings=8192, rope_type="llama3"),
)  # fmt: skip
GLM = dict(
    head_dim=128, max_position_embeddings=32_768, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
    rope_theta=10_000.0, tie_word_embeddings=False, eos_token_id=[151_329, 151_336, 151_338],
)  # fmt: skip
COHERE = dict(layer_norm_eps=1e-5, eos_token_id=255_001, logit_scale=0.0625)
COHERE2 = dict(**COHERE, rope_theta=50_000.0, sliding_window=4096, sliding_window_pattern=4)


def published(
    architecture: str, hidden: int, layers: int, heads: int, kv_heads: int | None,
    intermediate: int, vocab: int, num_parameters: int, **others: Any,
) -> Published:  # fmt: skip
    """A file with the fields that matter. Old files have no number of key heads."""
    file = {
        "architectures": [f"{architecture}ForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": "silu",
        "intermediate_size": intermediate, "vocab_size": vocab, "torch_dtype": "bfloat16", **others,
    }  # fmt: skip
    if kv_heads is not None:
        file["num_key_value_heads"] = kv_heads
    return Published(file, num_parameters)


PUBLISHED: dict[str, Published] = {
    "OLMo-2-0425-1B": published(
        "Olmo2", 2048, 16, 16, 16, 8192, 100_352, 1_484_916_736, **OLMO
    ),
    "OLMo-2-1124-7B": published(
        "Olmo2", 4096, 32, 32, None, 11_008, 100_352, 7_298_617_344, **OLMO
    ),
    "OLMo-2-1124-13B": published(
        "Olmo2", 5120, 40, 40, 40, 13_824, 100_352, 13_716_198_400, **OLMO
    ),
    "OLMo-2-0325-32B": published(
        "Olmo2", 5120, 64, 40, 8, 27_648, 100_352, 32_234_279_936, **OLMO
    ),
    "Olmo-3-7B": published(
        "Olmo3", 4096, 32, 32, 32, 11_008, 100_278, 7_298_011_136, **OLMO3
    ),
    "Olmo-3-32B": published(
        "Olmo3", 5120, 64, 40, 8, 27_648, 100_278, 32_233_522_176, **OLMO3,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 16,
    ),
    "granite-3.1-2b": published(
        "Granite", 2048, 40, 32, 8, 8192, 49_155, 2_533_531_648, **GRANITE,
        attention_multiplier=0.015625, logits_scaling=8.0,
    ),
    "granite-3.1-8b": published(
        "Granite", 4096, 40, 32, 8, 12_800, 49_155, 8_170_848_256, **GRANITE,
        attention_multiplier=0.0078125, logits_scaling=16.0,
    ),
    "Seed-OSS-36B": published(
        "SeedOss", 5120, 64, 80, 8, 27_648, 155_136, 36_151_104_512, head_dim=128,
        attention_bias=True, attention_out_bias=False, mlp_bias=False, rope_theta=1e7,
        rope_scaling={"rope_type": "default"}, max_position_embeddings=524_288,
        rms_norm_eps=1e-6, tie_word_embeddings=False,
    ),
    "Ministral-3-3B": published(
        "Ministral3", 3072, 26, 32, 8, 9216, 131_072, 3_429_006_336, **MINISTRAL,
        tie_word_embeddings=True,
    ),
    "Ministral-3-8B": published(
        "Ministral3", 4096, 34, 32, 8, 14_336, 131_072, 8_489_553_920, **MINISTRAL
    ),
    "Ministral-3-14B": published(
        "Ministral3", 5120, 40, 32, 8, 16_384, 131_072, 13_506_073_600, **MINISTRAL
    ),
    "EXAONE-4.0-1.2B": published(
        "Exaone4", 2048, 30, 32, 8, 4096, 102_400, 1_279_391_488,
        **{**EXAONE, "max_position_embeddings": 65_536}, head_dim=64, tie_word_embeddings=True,
        sliding_window=None, sliding_window_pattern=None, layer_types=[FULL] * 30,
    ),
    "EXAONE-4.0-32B": published(
        "Exaone4", 5120, 64, 40, 8, 27_392, 102_400, 32_003_216_384, **EXAONE, head_dim=128,
        sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 16,
    ),
    "ERNIE-4.5-0.3B": published(
        "Ernie4_5", 1024, 18, 16, 2, 3072, 103_424, 360_748_032, head_dim=128,
        max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0, use_bias=False,
        tie_word_embeddings=True, eos_token_id=2,
    ),
    "GLM-4-9B-0414": published(
        "Glm4", 4096, 40, 32, 2, 13_696, 151_552, 9_400_279_040, **GLM, attention_bias=True
    ),
    "GLM-4-32B-0414": published(
        "Glm4", 6144, 61, 48, 2, 23_040, 151_552, 32_566_081_536, **GLM, attention_bias=False
    ),
    "helium-1-2b": published(
        "Helium", 2048, 28, 16, 8, 8192, 64_000, 2_023_868_416, head_dim=128,
        max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=20_000.0,
    ),
    "helium-1-preview-2b": published(
        "Helium", 2560, 24, 20, 20, 7040, 48_000, 2_172_643_840, head_dim=128,
        max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=100_000.0,
    ),
    "nanochat-d32": published(
        "NanoChat", 2048, 32, 16, 16, 8192, 65_536, 1_879_048_192,
        hidden_act="relu2", final_logit_softcapping=15.0,
    ),
    "c4ai-command-r-v01": published(
        "Cohere", 8192, 40, 64, 64, 22_528, 256_000, 34_980_831_232, **COHERE,
        rope_theta=8e6, max_position_embeddings=8192, use_qk_norm=False,
    ),
    "c4ai-command-r-08-2024": published(
        "Cohere", 8192, 40, 64, 8, 24_576, 256_000, 32_296_476_672, **COHERE,
        rope_theta=4e6, max_position_embeddings=131_072, use_qk_norm=False,
    ),
    "c4ai-command-r-plus": published(
        "Cohere", 12_288, 64, 96, 8, 33_792, 256_000, 103_810_674_688, **COHERE,
        rope_theta=75e6, max_position_embeddings=8192, use_qk_norm=True,
    ),
    "aya-23-8B": published(
        "Cohere", 4096, 32, 32, 8, 14_336, 256_000, 8_028_033_024, **COHERE,
        rope_theta=10_000.0, max_position_embeddings=8192, use_qk_norm=False,
    ),
    "c4ai-command-r7b-12-2024": published(
        "Cohere2", 4096, 32, 32, 8, 14_336, 256_000, 8_028_033_024, **COHERE2,
        max_position_embeddings=132_096,
    ),
    "c4ai-command-a-03-2025": published(
        "Cohere2", 12_288, 64, 96, 8, 36_864, 256_000, 111_057_580_032, **COHERE2,
        max_position_embeddings=131_072,
    ),
}  # fmt: skip
