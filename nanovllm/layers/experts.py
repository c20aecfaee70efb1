"""Experts: parallel feed-forward layers, of which each token uses a few."""

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

    The ranks split the intermediate dimension of every expert, or each rank holds some `whole`
    experts. In both cases every rank computes on all tokens, which it has from attention, and the
    ranks add up their outputs: no token is sent to another rank. A checkpoint has three matrices
    for each expert. `shard_id` numbers the matrices that make up a parameter, through all experts;
    it is None for a tensor that holds all of them.
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
        self.intermediate_size = intermediate_size  # on all ranks together
        self.held, self.columns = slice(0, num_experts), slice(0, intermediate_size)
        if whole:
            self.held = ranks.near_equal_slice(num_experts)
        else:
            self.columns = ranks.equal_slice(intermediate_size)
        num_held = self.held.stop - self.held.start
        size = self.columns.stop - self.columns.start
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

        The matrix of an expert on another rank is not read; only its shape is checked.
        """
        if shard_id is None:
            self._load_all(param, loaded)
        elif param is self.down_proj:
            shape, index = (param.shape[1], self.intermediate_size), (WHOLE, self.columns)
            self._load_one(param, loaded, shard_id, shape, index)
        else:
            expert, half = divmod(shard_id, 2)
            shape = (self.intermediate_size, param.shape[2])
            self._load_one(param.chunk(2, dim=1)[half], loaded, expert, shape, (self.columns,))

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
            shape = (self.num_experts, param.shape[1], self.intermediate_size)
            copy_into(param, loaded, shape, (self.held, WHOLE, self.columns))
        else:
            shape = (self.num_experts, 2 * self.intermediate_size, param.shape[2])
            offsets = (0, self.intermediate_size)
            for half, offset in zip(param.chunk(2, dim=1), offsets, strict=True):
                rows = slice(offset + self.columns.start, offset + self.columns.stop)
                copy_into(half, loaded, shape, (self.held, rows))

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels
        self.pack()

    def pack(self) -> None:
        """Replace the weights with copies in oneDNN's blocked layout, if the plain kernel runs.

        Peak memory: each of the two parameters is held twice while it is copied.
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
        """For each row of x, the sum of its experts' outputs, weighted by `shares` [T, K]."""
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
