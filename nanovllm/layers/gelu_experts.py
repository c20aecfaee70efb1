"""Experts that gelu gates."""

from nanovllm.kernels.plain.gelu_and_mul import gelu_and_mul
from nanovllm.layers.experts import Experts


class GeluExperts(Experts):
    """The feed-forward layers of all experts, with gelu instead of silu."""

    activation = staticmethod(gelu_and_mul)
