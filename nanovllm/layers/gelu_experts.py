"""Experts that gelu gates."""

from typing import Any

from nanovllm.kernels.plain.gelu_and_mul import gelu_and_mul
from nanovllm.layers.experts import Experts


class GeluExperts(Experts):
    """The feed-forward layers of all experts, with gelu instead of silu."""

    activation = staticmethod(gelu_and_mul)

    def _options(self) -> dict[str, Any]:
        if self.matrices is None:
            return super()._options()
        return {"activation": self.kernels.gelu_and_mul}
