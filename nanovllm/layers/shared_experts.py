"""SharedSparseMLP: experts that a router selects, and a gated layer that all tokens use."""

import torch

from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.plain.sigmoid import sigmoid
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.sparse_mlp import SparseMLP


class SharedSparseMLP(SparseMLP):
    """The sum of the selected experts and of a layer that all tokens share.

    `name` is the name of the shared layer in checkpoints. If it `is_gated`, its output is
    multiplied by the sigmoid of the output of one more linear layer, which has the same name with
    `_gate` at the end.
    """

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
        *,
        shared_size: int,
        name: str = "shared_experts",
        is_gated: bool = False,
    ) -> None:
        super().__init__(make, hidden_size, intermediate_size, num_experts, routing)
        shared = MLP(make.inside(name), hidden_size, shared_size)
        gate = None
        if is_gated:
            stored = make.formats.of(f"{name}_gate")
            gate = ReplicatedLinear(hidden_size, 1, weight_format=stored)
            self.add_module(f"{name}_gate", gate)
        self.add_module(name, shared)
        self.shared = shared, gate  # a tuple: the modules are registered by their names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, gate = self.shared
        shared: torch.Tensor = layer(x)
        if gate is not None:
            shared = shared * sigmoid(gate(x))
        return super().forward(x) + shared
