"""SparseMLP: a feed-forward part of experts, and the router that selects some for each token."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.format import DENSE, WeightFormat
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import BIAS, ReplicatedLinear

if TYPE_CHECKING:
    from nanovllm.kernels.triton.experts.route import Router as RouterKernel  # which needs Triton


class ExpertRouter(ReplicatedLinear):
    """Selects K of E experts for each row, with a share for each, as `routing` says.

    In float32 for every model type: rounding must not decide between experts.
    """

    kernel: "RouterKernel | None" = None  # instead of `matrix`, for a plain weight
    kernels: Kernels = PLAIN

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        weight_format: WeightFormat = DENSE,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, num_experts, bias, weight_format)
        if self.bias is not None:
            self.bias.data = self.bias.data.float()
        self.routing = routing
        self.dtype = torch.get_default_dtype()
        self.e_score_correction_bias: nn.Parameter | None = None
        if routing.has_bias:
            self.e_score_correction_bias = self.rank_part.new(replace(BIAS, dtype=torch.float32))

    def bind(self, backend: Backend) -> None:
        """Make the kernel, where there is one, else the matrix. A second call does nothing."""
        if self.kernel is not None or self.matrix is not None:
            return
        self.kernels = backend.kernels
        weight = self.weight_format.weight(self.stored_tensors(), self.rank_part)
        if isinstance(weight, torch.Tensor) and self.routing.is_fused:
            self.kernel = backend.kernels.router(
                weight, self.dtype, self.routing, self.bias, self.e_score_correction_bias
            )
        if self.kernel is None:
            super().bind(backend)
        else:
            self.weight_format.drop(self)

    def select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares [T, K] and the ids [T, K] of the experts of rows x [T, hidden]."""
        if self.low_rank and (adapters := adapter_rows()):
            zeros = partial(x.new_zeros, len(x), self.rank_part.num_rows)
            added = adapters.add(x, self.low_rank, zeros)
            if self.kernel is not None and self.kernel.one_order:
                return self.kernel.route(x, added)
            return self._choose(self._outputs(x) + added)
        if self.kernel is None:
            return self._choose(self._outputs(x))
        return self.kernel.route(x)

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs [T, E] of rows x."""
        if self.kernel is None:
            return self.linear(x.float(), self.bias)
        return F.linear(x.float(), self.kernel.weight.float(), self.bias)

    def _choose(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.e_score_correction_bias
        shares, ids = self.kernels.choose_experts(outputs, self.routing, bias)
        return shares, ids


class SparseMLP(FeedForward):
    """Experts, and the router that selects some of them, with a share for each."""

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
    ) -> None:
        super().__init__()
        in_float32 = make.formats.in_float32("gate")
        self.gate = ExpertRouter(hidden_size, num_experts, routing, in_float32)
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, make.ranks, make.whole_experts,
            make.formats.of_experts(num_experts), make.formats.names.experts,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, expert_ids = self.gate.select(x)
        out: torch.Tensor = self.experts(x, expert_ids, shares)
        return out
