"""The usual names of a GGUF file's tensors, those of a safetensors checkpoint."""

import re
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from nanovllm.models.gguf.hybrid_names import (
    ABOVE_EXPERTS,
    HYBRID_LAYERS,
    OF_ROUTER,
    PLAIN_NORM,
    PLUS_ONE,
    SPLIT,
)

if TYPE_CHECKING:
    from nanovllm.models.gguf.metadata import Metadata

OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
       "position_embd": "model.embed_positions", "token_embd_norm": "model.norm"}  # fmt: skip
LAYERS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
# What an architecture calls otherwise.
TWO_NORMS = "falcon with two norms"  # in a block
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
SANDWICH = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
LATE_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
}  # fmt: skip


def _shared(above: str) -> dict[str, str]:
    """The names of an expert that all tokens use."""
    return {f"ffn_{kind}_shexp": f"{above}.{kind}_proj" for kind in ("gate", "up", "down")}


OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen2moe": {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared("mlp.shared_expert"),
    },
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm", **_shared("mlp.shared_experts"),
    },
    "ernie4_5-moe": _shared("mlp.shared_experts"), "dots1": _shared("mlp.shared_experts"),
    "hunyuan-moe": {
        **LATE_NORMS, "ffn_gate_inp": "mlp.gate.wg", **_shared("mlp.shared_mlp"),
    },
    "olmo2": POST_NORMS, "exaone4": POST_NORMS,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "hunyuan-dense": LATE_NORMS,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "gemma2": SANDWICH, "gemma3": SANDWICH,
    "afmoe": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    TWO_NORMS: {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"},
}  # fmt: skip
ONE_ROW = "ffn_gate_inp_shexp.weight"  # end of the name of a matrix that may be a vector
ROUTER_BIAS = "exp_probs_b"
SINKS = "attn_sinks"  # a tensor that is no module's weight
# The stacks of all experts' matrices [E, N, K].
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
EXPERTS_OF = {
    "llama": MIXTRAL,
    "phimoe": MIXTRAL,
    "minimax-m2": MIXTRAL,
}  # where an architecture has other names
# Factors of the rotation's frequencies: they become fields of the config.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
# The converter stores the rows of these with the two halves of each head interleaved, ...
INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}  # heads by the metadata's keys
INTERLEAVED_ARCHITECTURES = (
    "llama", "smollm3", "granite", "arcee", "granitemoe", "granitehybrid",
)  # fmt: skip

# The converter adds 1 to the weights of these architectures' norms.
PLUS_ONE_ARCHITECTURES = ("nemotron", "gemma", "gemma2", "gemma3", *PLUS_ONE)


def naming(architecture: str, tensors: Container[str]) -> str:
    """The key of OF_ARCHITECTURE for a file with these tensors."""
    two = architecture == "falcon" and "blk.0.attn_norm_2.weight" in tensors
    return TWO_NORMS if two else architecture


def usual_name(name: str, architecture: str) -> str:
    """The usual name of a tensor. An unknown name stays, for the loader to refuse it."""
    stem, _, leaf = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{leaf}"
    inside = HYBRID_LAYERS.get(architecture, {})
    if (match := OF_LAYER.fullmatch(name)) is not None and match[2] in inside:
        return f"model.layers.{match[1]}.{inside[match[2]]}"
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return name
    if match[2] == SINKS:
        return f"model.layers.{match[1]}.self_attn.sinks"
    if match[2] == ROUTER_BIAS:
        return f"model.layers.{match[1]}.mlp.gate.{OF_ROUTER}"
    layers = {**LAYERS, **OF_ARCHITECTURE.get(architecture, {})}
    if match[2] not in layers:
        return name
    return f"model.layers.{match[1]}.{layers[match[2]]}.{match[3]}"


def usual_names(name: str, architecture: str) -> list[str]:
    """The usual names of a tensor that may hold several."""
    if (match := OF_LAYER.fullmatch(name)) is not None and match[2] in SPLIT:
        return [f"model.layers.{match[1]}.{each}" for each in SPLIT[match[2]]]
    return [usual_name(name, architecture)]


def expert_names(name: str, number: int, architecture: str) -> list[str]:
    """The names of each expert's matrix, for a stack of them; none for another tensor."""
    match = IN_LAYER.fullmatch(name)
    if match is None or match[2] not in EXPERTS:
        return []
    matrix = EXPERTS_OF.get(architecture, EXPERTS)[match[2]]
    above = f"model.layers.{match[1]}.{ABOVE_EXPERTS.get(architecture, 'mlp')}.experts"
    return [f"{above}.{expert}.{matrix}.{match[3]}" for expert in range(number)]


def interleaved_heads(name: str, architecture: str) -> str | None:
    """The key of the number of heads whose halves a tensor interleaves; None: it does not."""
    match = IN_LAYER.fullmatch(name)
    if match is None or architecture not in INTERLEAVED_ARCHITECTURES:
        return None
    return INTERLEAVED.get(match[2])


def has_one_row(name: str, architecture: str) -> bool:
    """Whether checkpoints have as a matrix of one row what may be a vector in files."""
    is_bias = name.endswith(f"{ROUTER_BIAS}.bias") and architecture == "ernie4_5-moe"
    return is_bias or name.endswith(ONE_ROW)


def is_of_drafts(name: str, metadata: "Metadata") -> bool:
    """Whether a tensor belongs to the last layers, which predict later tokens; nobody uses them."""
    match = OF_LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= metadata.num_layers


def has_plus_one(name: str, architecture: str) -> bool:
    """Whether a tensor has the factors 1 + weight of a norm."""
    is_norm = name.endswith("norm.weight") and not name.endswith(PLAIN_NORM)
    return architecture in PLUS_ONE_ARCHITECTURES and is_norm
