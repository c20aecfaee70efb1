"""Experts: feed-forward layers side by side, of which each token takes a few."""

import torch
from torch import nn

from nanovllm.kernels.cpu.packed_linear import can_pack, pack, packed_linear
from nanovllm.kernels.plain.experts import experts as plain_experts
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import WHOLE, Layer, Loaded, check_shape, copy_into
from nanovllm.layers.ranks import ALONE, Ranks


class Experts(Layer):
    """The gated feed-forward layers of all E experts: [T, hidden] -> [T, hidden].

    The ranks share out every expert's inside, I wide, or hold `whole` experts, a few each. Either
    way they add up the outputs: every rank has all the tokens, as attention leaves them with all
    ranks, so that none travels to its experts. A checkpoint has three matrices for each expert. Of
    those that make a parameter, `shard_id` counts through all experts'; it is None for a tensor
    that has them all.
    """

    kernels: Kernels = PLAIN

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        ranks: Ranks = ALONE,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_experts = num_experts
        self.all_inside = intermediate_size
        everyone, everything = slice(0, num_experts), slice(0, intermediate_size)
        self.held = ranks.deal(num_experts) if whole else everyone
        self.inside = everything if whole else ranks.share(intermediate_size)
        num_held = self.held.stop - self.held.start
        size = self.inside.stop - self.inside.start
        self.gate_up_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_held, 2 * size, hidden_size), requires_grad=False
        )
        self.down_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_held, hidden_size, size), requires_grad=False
        )
        self.packed: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def parts(self, name: str) -> list[str]:
        """The checkpoint's names for the matrices of each expert that make up `name`."""
        kinds = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        return [f"{i}.{kind}.weight" for i in range(self.num_experts) for kind in kinds]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill an expert's part of `param`, or all of it from one tensor [E, out, in].

        Of an expert that another rank holds, the shape is checked and nothing is read.
        """
        if shard_id is None:
            self._load_all(param, loaded)
        elif param is self.down_proj:
            shape, index = (param.shape[1], self.all_inside), (WHOLE, self.inside)
            self._load_one(param, loaded, shard_id, shape, index)
        else:
            expert, half = divmod(shard_id, 2)
            shape = (self.all_inside, param.shape[2])
            self._load_one(param.chunk(2, dim=1)[half], loaded, expert, shape, (self.inside,))

    def _load_one(
        self,
        targets: torch.Tensor,
        loaded: Loaded,
        expert: int,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
    ) -> None:
        if self.held.start <= expert < self.held.stop:
            copy_into(targets[expert - self.held.start], loaded, shape, index)
        else:
            check_shape(loaded, shape)

    def _load_all(self, param: nn.Parameter, loaded: Loaded) -> None:
        if param is self.down_proj:
            shape = (self.num_experts, param.shape[1], self.all_inside)
            copy_into(param, loaded, shape, (self.held, WHOLE, self.inside))
        else:
            shape = (self.num_experts, 2 * self.all_inside, param.shape[2])
            for half, above in zip(param.chunk(2, dim=1), (0, self.all_inside), strict=True):
                rows = slice(above + self.inside.start, above + self.inside.stop)
                copy_into(half, loaded, shape, (self.held, rows))

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels
        self.pack()

    def pack(self) -> None:
        """Replace the weights with copies in oneDNN's blocked layout, where the plain loop runs.

        Peak memory: each of the two parameters twice, while it is copied.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if gate_up is None or down is None:
            return
        if self.kernels.experts is plain_experts and can_pack(down):
            packed = [pack(weight) for weight in gate_up]
            self.gate_up_proj = gate_up = None
            self.packed = packed, [pack(weight) for weight in down]
            self.down_proj = None

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Of each row of x, the sum of its experts' outputs [T, K] by their shares [T, K]."""
        if self.held.start:
            expert_ids = expert_ids - self.held.start
        if self.packed is not None:
            gate_up, down = self.packed
            out = plain_experts(
                x, gate_up, down, expert_ids, shares, self.num_experts, packed_linear
            )
        else:
            assert self.gate_up_proj is not None and self.down_proj is not None
            out = self.kernels.experts(
                x, self.gate_up_proj, self.down_proj, expert_ids, shares, self.num_experts
            )
        return self.ranks.all_reduce(out)
