"""Activations of feed-forward parts without a gate, by their names in configs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer

Activation = Callable[[torch.Tensor], torch.Tensor]


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """The square of relu."""
    return F.relu(x).square_()


gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu, "relu2": relu_squared, "silu": F.silu,
}  # fmt: skip


class PlainActivation(Layer):
    """The activation of a name in ACTIVATIONS, or that of the kernels that avoid PyTorch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.function = name, ACTIVATIONS[name]

    def bind(self, backend: Backend) -> None:
        if backend.kernels.avoids_pytorch:
            from nanovllm.kernels.cpu.activations import IN_ONE_ORDER

            self.function = IN_ONE_ORDER.get(self.name, self.function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class XIELU(Layer):
    """xIELU: a parabola above 0, an exponential below; each has a learned factor.

    The factors are a = softplus(alpha_p) and b = 0.5 + softplus(alpha_n):
    a * x^2 + x / 2 above 0, b * (exp(x) - 1 - x) + x / 2 below.
    """

    initial = 0.0
    beta, eps = 0.5, -1e-6

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = F.softplus(self.alpha_p) * x * x
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, above, below).add_(x, alpha=self.beta)


def activation_of(name: str) -> Activation:
    """The activation of this name, as a new layer."""
    return XIELU() if name == "xielu" else PlainActivation(name)
