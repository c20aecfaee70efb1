"""The router of a layer of experts."""

from typing import TYPE_CHECKING

import torch

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.formats.tensors import drop_tensors
from nanovllm.kernels.plain.route import choose
from nanovllm.layers.backend import Backend
from nanovllm.layers.linear import ReplicatedLinear

if TYPE_CHECKING:
    from nanovllm.kernels.triton.experts.route import Router as RouterKernel  # which needs Triton


class Router(ReplicatedLinear):
    """Selects K of E experts for each row, with a share for each.

    In float32 for every model type: rounding must not decide between experts.
    """

    kernel: "RouterKernel | None" = None  # instead of `matrix`, for a plain weight

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        per_token: int,
        normalized: bool,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__(hidden_size, num_experts, weight_format=weight_format)
        self.per_token, self.normalized = per_token, normalized
        self.dtype = torch.get_default_dtype()

    def bind(self, backend: Backend) -> None:
        """Make the kernel, where there is one, else the matrix. A second call does nothing."""
        if self.kernel is not None or self.matrix is not None:
            return
        weight = self.weight_format.weight(self.stored_tensors(), self.held)
        if isinstance(weight, torch.Tensor):
            self.kernel = backend.kernels.router(weight, self.dtype)
        if self.kernel is None:
            super().bind(backend)
        else:
            drop_tensors(self, self.weight_format)

    def select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares [T, K] and the ids [T, K] of the experts of rows x [T, hidden]."""
        if self.kernel is None:
            scores = self.linear(x.float(), self.bias)
            return choose(scores, self.per_token, self.normalized)
        return self.kernel.route(x, self.per_token, self.normalized)
