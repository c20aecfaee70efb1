"""The rotation's fields of a `config.json`, from a GGUF file's metadata and small tensors."""

import math
from typing import Any

from nanovllm.models.gguf.metadata import REQUIRED, Metadata
from nanovllm.models.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from nanovllm.utils.checks import shorten

# Architectures that may rotate a part of each head.
PARTIAL = ("phi3", "glm4", "gptneox", "phi2", "stablelm", "nemotron", "qwen3next", "qwen35",
            "qwen35moe", "glm4moe", "minimax-m2", "mimo2")  # fmt: skip
# Architectures that rotate nothing, whatever their files say.
NO_ROPE = ("mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe")
# Architectures that do not truncate yarn's ramp, and scale unless a config says otherwise.
NOT_TRUNCATED = ("gpt-oss",)
# The factor of cosines and sines in all configs of Phi-3.5-MoE's family. The converter leaves it
# out, and writes the usual one of longrope.
PHIMOE_SCALE = 1.243163121016122
# What Llama 3.1 to 3.3 have in common: their files have only the factors that result.
LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def rope_fields(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """The base, the rotated part of each head, and the scaling."""
    if metadata.architecture in NO_ROPE:
        metadata.ignore("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned")
        return {}
    theta = metadata.number("rope.freq_base", 10_000.0)
    rotated = metadata.size("rope.dimension_count", head_dim)
    fields: dict[str, Any] = {"rope_theta": theta}
    if rotated != head_dim:
        if metadata.architecture not in PARTIAL:
            raise metadata.wrong("rope.dimension_count", rotated, f"{head_dim}, the heads' size")
        fields["partial_rotary_factor"] = rotated / head_dim
    if (long_factors := metadata.model.floats(LONG_FACTORS)) is not None:
        return fields | _longrope(metadata, long_factors)
    scaling = _scaling(metadata)
    if (factors := metadata.model.floats(ROPE_FACTORS)) is not None:
        if scaling is not None:
            kind = metadata.get("rope.scaling.type")
            raise metadata.wrong("rope.scaling.type", kind, f"absent next to {ROPE_FACTORS}")
        scaling = _of_factors(factors, theta)
    if scaling is None and metadata.architecture in NOT_TRUNCATED:
        scaling = {"rope_type": "default"}
    return fields if scaling is None else {**fields, "rope_scaling": scaling}


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
    """The scaling that the metadata describe by numbers."""
    old = metadata.number("rope.scale_linear", None)  # of files before October 2023
    kind = metadata.get("rope.scaling.type", "none" if old is None else "linear")
    if kind == "none":
        metadata.only("rope.scaling.factor", (0.0, 1.0))
        metadata.only("rope.scaling.attn_factor", (1.0,))
        metadata.get("rope.scaling.original_context_length", None)
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.wrong("rope.scaling.type", kind, "linear, yarn, or none, or have tensors")
    factor = metadata.number("rope.scaling.factor", 1.0 if old is None else old)
    if kind == "linear":
        metadata.only("rope.scaling.attn_factor", (1.0,))
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    usual = 0.1 * math.log(max(factor, 1.0)) + 1  # of cosines and sines; some converters write it
    if not math.isclose(metadata.number("rope.scaling.attn_factor", 1.0), usual, rel_tol=1e-6):
        metadata.only("rope.scaling.attn_factor", (1.0,))
    metadata.only("rope.scaling.yarn_ext_factor", (1.0,))
    metadata.only("rope.scaling.yarn_attn_factor", (1.0,))
    given = {
        **_scale_weights(metadata),
        "original_max_position_embeddings":
            metadata.size("rope.scaling.original_context_length", None),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", None),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", None),
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": factor} | {n: v for n, v in given.items() if v}
    return yarn | ({"truncate": False} if metadata.architecture in NOT_TRUNCATED else {})


def _scale_weights(metadata: Metadata) -> dict[str, float]:
    """Yarn's `mscale`, and that of scores, which files of DeepSeek have a tenth of."""
    key = "rope.scaling.yarn_log_multiplier"
    if metadata.architecture != "deepseek2":
        metadata.only(key, (0.0,))
        return {}
    if not metadata.get(key, 0.0):
        return {}
    weight = round(10 * metadata.number(key), 6)
    return {"mscale": weight, "mscale_all_dim": weight}


def _longrope(metadata: Metadata, long_factors: list[float]) -> dict[str, Any]:
    """Phi 3's scaling: a factor for each frequency, of short and of long contexts."""
    if (short_factors := metadata.model.floats(SHORT_FACTORS)) is None:
        raise ValueError(f"the file has {LONG_FACTORS}, but no {SHORT_FACTORS}")
    metadata.only("rope.scaling.type", ("longrope", "none"))
    metadata.get("rope.scaling.factor", None)
    longest = metadata.size("context_length")
    usual_length = longest if metadata.architecture == "minicpm3" else REQUIRED
    trained = metadata.size("rope.scaling.original_context_length", usual_length)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": short_factors,
        "long_factor": long_factors,
    }
    attention = metadata.number("rope.scaling.attn_factor", None)
    factor = max(longest / trained, 1.0)
    usual = math.sqrt(1 + math.log(factor) / math.log(max(trained, 2)))
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-6):
        scaling["attention_factor"] = attention
    if metadata.architecture == "phimoe":
        scale = scaling.pop("attention_factor", PHIMOE_SCALE)
        scaling |= {"short_mscale": scale, "long_mscale": scale}
    return {"rope_scaling": scaling, "original_max_position_embeddings": trained}


def _of_factors(factors: list[float], theta: float) -> dict[str, Any]:
    """The scaling by a divisor for each frequency: that of Llama 3, if it has those divisors.

    Others are spelt as longrope with equal factors for all lengths, which divides by them.
    """
    if not all(0 < factor < 1e30 for factor in factors):
        raise ValueError(f"{ROPE_FACTORS} must have numbers above 0, got {shorten(factors)}")
    largest = max(factors)
    usual = [_llama3_divisor(i, 2 * len(factors), theta, largest) for i in range(len(factors))]
    if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(factors, usual, strict=True)):
        return {"rope_type": "llama3", "factor": largest, **LLAMA3}
    same = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", "attention_factor": 1.0, **same}


def _llama3_divisor(index: int, dim: int, theta: float, factor: float) -> float:
    """What the scaling of Llama 3 divides a frequency by."""
    low, high, trained = LLAMA3.values()
    rotations = trained / (2 * math.pi * theta ** (2 * index / dim))
    blend = min(max((rotations - low) / (high - low), 0.0), 1.0)
    return float(1 / ((1 - blend) / factor + blend))
