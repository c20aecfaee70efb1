"""The frequencies of rotary position embedding by `rope_type`, as transformers defines them.

Each function makes them of the default frequencies [R / 2], and returns them with the factor of
cosines and sines.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Parameters = Mapping[str, Any]
Scaled = tuple[torch.Tensor, float]


def _unchanged(inv_freq: torch.Tensor, parameters: Parameters) -> Scaled:  # noqa: ARG001
    return inv_freq, 1.0


def _linear(inv_freq: torch.Tensor, parameters: Parameters) -> Scaled:
    return inv_freq / parameters["factor"], 1.0


def _yarn(inv_freq: torch.Tensor, parameters: Parameters) -> Scaled:
    """Interpolate the slow frequencies, keep the fast ones, with a ramp in between (YaRN)."""
    dim, base, factor = 2 * len(inv_freq), parameters["rope_theta"], parameters["factor"]
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


def _llama3(inv_freq: torch.Tensor, parameters: Parameters) -> Scaled:
    """Divide the slow frequencies, keep the fast ones, and blend in between (Llama 3.1)."""
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    rotations = trained * inv_freq / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq, 1.0


def _longrope(inv_freq: torch.Tensor, parameters: Parameters) -> Scaled:
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
    dim = 2 * len(inv_freq)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    divisors = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (divisors * parameters["rope_theta"] ** exponents), float(scaling)


ROPE_TYPES: dict[str, Callable[[torch.Tensor, Parameters], Scaled]] = {
    "default": _unchanged,
    "linear": _linear,
    # NTK scaling changes frequencies only past the trained length, which would change cached keys.
    # So contexts end at that length here (`models/rope.py`).
    "dynamic": _unchanged,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def scaled_frequencies(
    inv_freq: torch.Tensor,
    max_positions: int,
    max_position_embeddings: int,
    parameters: Parameters,
) -> Scaled:
    """The default frequencies, scaled as the rope type says, for contexts up to `max_positions`.

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
    try:
        with torch.device("cpu"):
            return ROPE_TYPES[rope_type](inv_freq, complete)
    except KeyError as error:
        raise ValueError(f"rope_type {rope_type!r} needs {error} in the config") from None
