"""Rotary position embedding: the table of cosines and sines. `norm_rope_store` applies it.

Frequencies follow transformers' definitions of each `rope_type`. A type that is not in
`ROPE_TYPES` is an error.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope

Parameters = Mapping[str, Any]


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions 0 .. max_positions-1, in float32: [P, 2, R / 2].

    R is the number of rotated dimensions of a head: all of them, in most models.

    Always computed on the CPU: at large angles, devices differ in the last bits.
    """

    def __init__(self, inv_freq: torch.Tensor, scaling: float, max_positions: int) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inv_freq)
        table = torch.stack([angles.cos(), angles.sin()], dim=1) * scaling
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rope:
        """Look up a step's positions [T] once for all layers: cos and sin, [T, 1, R / 2] each."""
        table: torch.Tensor = self.get_buffer("table")
        cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cos, sin


def _default(dim: int, parameters: Parameters) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _linear(dim: int, parameters: Parameters) -> tuple[torch.Tensor, float]:
    inv_freq, scaling = _default(dim, parameters)
    return inv_freq / parameters["factor"], scaling


def _yarn(dim: int, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Interpolate the slow frequencies, keep the fast ones, with a ramp in between (YaRN)."""
    base, factor = parameters["rope_theta"], parameters["factor"]
    trained = parameters["original_max_position_embeddings"]

    def rotating_dim(rotations: float) -> float:
        """The dimension that makes `rotations` rotations within the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = rotating_dim(parameters.get("beta_fast") or 32)
    high = rotating_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq, _ = _default(dim, parameters)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_attention_factor(parameters)


def _yarn_attention_factor(parameters: Parameters) -> float:
    def mscale(weight: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _llama3(dim: int, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Divide the slow frequencies, keep the fast ones, and blend in between (Llama 3.1)."""
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq, scaling = _default(dim, parameters)
    rotations = trained * inv_freq / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq, scaling


def _longrope(dim: int, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Divide each frequency by its own factor, from a short or a long set (LongRoPE).

    transformers uses the short set while a sequence is within the trained length, and then the
    long set for all its tokens. Here keys are cached with their rotation, so all sequences use one
    set: the short one if `length`, the maximum, is within the trained length, else the long one.
    With a max_model_len within the trained length, all outputs equal transformers'. Above it, only
    those of prompts longer than the trained length do.
    """
    trained = parameters["original_max_position_embeddings"]
    factor, scaling = parameters["factor"], parameters.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    factors = parameters["long_factor" if parameters["length"] > trained else "short_factor"]
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    divisors = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (divisors * parameters["rope_theta"] ** exponents), float(scaling)


ROPE_TYPES: dict[str, Callable[[int, Parameters], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    # NTK scaling changes frequencies only past the trained length, which would change cached keys.
    # So contexts end at that length here (`models/rope.py`).
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def rope_frequencies(
    head_dim: int, max_positions: int, max_position_embeddings: int, parameters: Parameters
) -> tuple[torch.Tensor, float]:
    """Frequencies [R / 2] for contexts up to `max_positions`, and the factor of cosines and sines.

    An unknown rope type or a missing parameter is a ValueError.
    """
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported; {', '.join(ROPE_TYPES)} are")
    complete = {**parameters, "length": max_positions}
    if not complete.get("original_max_position_embeddings"):
        complete["original_max_position_embeddings"] = max_position_embeddings
    if rope_type == "longrope" and complete.get("factor") is None:
        trained = complete["original_max_position_embeddings"]
        complete["factor"] = max_position_embeddings / trained
    rotated = int(head_dim * complete.get("partial_rotary_factor", 1.0))
    try:
        with torch.device("cpu"):
            return ROPE_TYPES[rope_type](rotated, complete)
    except KeyError as error:
        raise ValueError(f"rope_type {rope_type!r} needs {error} in the config") from None


def get_rope(
    head_dim: int, max_positions: int, max_position_embeddings: int, parameters: Parameters
) -> RotaryEmbedding:
    """Build the table for `max_positions` positions. Raises as `rope_frequencies` does."""
    inv_freq, scaling = rope_frequencies(
        head_dim, max_positions, max_position_embeddings, parameters
    )
    return RotaryEmbedding(inv_freq, scaling, max_positions)
