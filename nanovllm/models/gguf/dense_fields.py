"""The fields of dense families that differ from Llama in norms, ropes, windows or factors."""

from collections.abc import Callable, Mapping

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config, attention_bias, biases, has, window
from nanovllm.models.windows import FULL, SLIDING

INTERVAL = 4  # every fourth layer has no window, in files that do not say which ones
PATTERN = "attention.sliding_window_pattern"


def _windows(metadata: Metadata) -> Config:
    """The window, and which layers have it."""
    flags, layers = metadata.flags(PATTERN), metadata.size("block_count")
    size = window(metadata)
    if flags is None or size is None:
        flags = [size is not None and index % INTERVAL != 0 for index in range(1, layers + 1)]
    kinds = [SLIDING if has_window else FULL for has_window in flags]
    return {"sliding_window": size, "layer_types": kinds}


def _olmo2(metadata: Metadata) -> Config:
    """OLMo 2, and OLMo 3, which has windows."""
    fields = {"model_type": "olmo2", **attention_bias(metadata)}
    if window(metadata) is None:
        return fields
    fields |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return fields | _windows(metadata)


def _granite(metadata: Metadata) -> Config:
    return {
        **biases(metadata),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _seed_oss(metadata: Metadata) -> Config:
    return {**biases(metadata), "attention_out_bias": has(metadata, "attn_output.bias")}


def _ernie4_5(metadata: Metadata) -> Config:
    return {"use_bias": has(metadata, "attn_q.bias")}


def _cohere(metadata: Metadata) -> Config:
    return {
        **attention_bias(metadata),
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": has(metadata, "attn_q_norm.weight"),
    }


def _cohere2(metadata: Metadata) -> Config:
    return {**_cohere(metadata), **_windows(metadata)}


DENSE: Mapping[str, Callable[[Metadata], Config]] = {
    "olmo2": _olmo2, "granite": _granite, "seed_oss": _seed_oss, "exaone4": _windows,
    "ernie4_5": _ernie4_5, "glm4": attention_bias, "hunyuan-dense": attention_bias,
    "command-r": _cohere, "cohere2": _cohere2,
}  # fmt: skip
