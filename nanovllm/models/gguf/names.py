"""The usual names of a GGUF file's tensors, those of a safetensors checkpoint."""

import re
from collections.abc import Mapping

IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYERS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
# What an architecture calls otherwise.
OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
SINKS = "attn_sinks"  # a tensor that is no module's weight
# The stacks of all experts' matrices [E, N, K].
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Factors of the rotation's frequencies: they become fields of the config.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
# The converter stores the rows of these with the two halves of each head interleaved, ...
INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}  # heads by the metadata's keys
INTERLEAVED_ARCHITECTURES = ("llama", "smollm3")  # ... for these architectures.


def usual_name(name: str, architecture: str) -> str:
    """The usual name of a tensor. An unknown name stays, for the loader to refuse it."""
    stem, _, leaf = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{leaf}"
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return name
    if match[2] == SINKS:
        return f"model.layers.{match[1]}.self_attn.sinks"
    layers = {**LAYERS, **OF_ARCHITECTURE.get(architecture, {})}
    if match[2] not in layers:
        return name
    return f"model.layers.{match[1]}.{layers[match[2]]}.{match[3]}"


def expert_names(name: str, number: int) -> list[str]:
    """The names of each expert's matrix, for a stack of them; none for another tensor."""
    match = IN_LAYER.fullmatch(name)
    if match is None or match[2] not in EXPERTS:
        return []
    above, matrix = f"model.layers.{match[1]}.mlp.experts", EXPERTS[match[2]]
    return [f"{above}.{expert}.{matrix}.{match[3]}" for expert in range(number)]


def interleaved_heads(name: str, architecture: str) -> str | None:
    """The key of the number of heads whose halves a tensor interleaves; None: it does not."""
    match = IN_LAYER.fullmatch(name)
    if match is None or architecture not in INTERLEAVED_ARCHITECTURES:
        return None
    return INTERLEAVED.get(match[2])
