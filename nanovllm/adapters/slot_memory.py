"""AdapterSlots: the memory of a rank's layers for adapters, and the adapters in it.

It does not know which requests use a slot.
"""

import contextlib

import torch

from nanovllm.adapters.modules import Module, modules_of
from nanovllm.adapters.tensors import AdapterTensors, Pair
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.models.decoder import CausalLM

Adapted = LinearBase | VocabParallelEmbedding | Experts
Matrix = tuple[Adapted, str]  # of a layer; the name is "" unless it has experts


class AdapterSlots:
    """Gives the layers of a model room for `num_slots` adapters with ranks up to `max_rank`.

    Every matrix of a layer that can have adapters gets a `LowRank`, with a group for each slot, or
    for each slot and expert.
    """

    def __init__(self, model: CausalLM, num_slots: int, max_rank: int) -> None:
        self.num_slots, self._max_rank = num_slots, max_rank
        self._modules = modules_of(model)
        self._low_ranks: dict[Matrix, LowRank] = {}
        like = model.model.norm.weight
        for module in self._modules.values():
            if _matrix(module) not in self._low_ranks:
                self._make_room(module, like)

    @torch.inference_mode()
    def place(self, slot: int, tensors: AdapterTensors) -> None:
        """Copy this rank's parts of an adapter into a slot, in place of the adapter in it.

        It does not wait for a GPU: the copies are queued on the current stream.
        """
        assert 0 <= slot < self.num_slots
        ranks = self._no_ranks()
        for name, pair in tensors.items():
            assert pair.rank <= self._max_rank
            module = self._modules[name]
            if (held := _held_experts(module)) is not None:
                own = ranks[_matrix(module)]
                first = slot * len(own)
                self._fill(slice(first + held.start, first + held.stop), module, pair)
                own[held, [*module.projections]] = pair.rank
        for matrix, own in ranks.items():
            first = slot * len(own)
            _copy(self._low_ranks[matrix].ranks[first : first + len(own)], own)

    def _make_room(self, module: Module, like: torch.Tensor) -> None:
        """Make empty slots for this rank's part of a module's matrix."""
        layer, held = module.layer, module.held
        num_groups = self.num_slots * (layer.num_own if isinstance(layer, Experts) else 1)
        num_parts = len(held.sizes)
        low_rank = LowRank(
            like.new_zeros(num_groups, num_parts * self._max_rank, held.num_columns),
            like.new_zeros(num_groups, self._max_rank, held.num_rows),
            like.new_zeros(num_groups, num_parts, dtype=torch.int32),
            tuple(part.stop - part.start for part in held.rows),
        )
        self._low_ranks[_matrix(module)] = low_rank
        if isinstance(layer, Experts):
            layer.low_ranks[module.matrix] = low_rank
        else:
            assert isinstance(layer, Adapted)
            layer.low_rank = low_rank

    def _fill(self, groups: slice, module: Module, pair: Pair) -> None:
        """Copy this rank's part of a module's matrices into a group, or one for each expert."""
        low_rank, held = self._low_ranks[_matrix(module)], module.held
        a, b = pair
        if isinstance(module.layer, Experts) and module.is_stack:
            a, b = a[module.layer.experts], b[module.layer.experts]
        sizes = [held.sizes[i] for i in module.projections]
        for projection, part in zip(module.projections, torch.split(b, sizes, -1), strict=True):
            first = projection * self._max_rank
            _copy(low_rank.a[groups, first : first + pair.rank], a[..., held.columns])
            columns = torch.split(low_rank.b[groups], [*low_rank.sizes], -1)[projection]
            _copy(columns[:, : pair.rank], part[..., held.rows[projection]])

    def _no_ranks(self) -> dict[Matrix, torch.Tensor]:
        """Zeros for the ranks of a slot: [experts, projections] of each matrix, on the host."""
        shapes = {
            matrix: (len(each.ranks) // self.num_slots, len(each.sizes))
            for matrix, each in self._low_ranks.items()
        }
        return {m: torch.zeros(shape, dtype=torch.int32) for m, shape in shapes.items()}


def _copy(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy from the host. Only copies from pinned memory to a GPU do not wait.

    PyTorch keeps the pinned memory until the copy is done.
    """
    if destination.is_cuda and not (values.is_contiguous() and values.is_pinned()):
        with contextlib.suppress(RuntimeError):  # the host cannot pin more memory
            values = values.contiguous().pin_memory()
    destination.copy_(values, non_blocking=True)


def _matrix(module: Module) -> Matrix:
    """The matrix that contains the module."""
    assert isinstance(module.layer, Adapted)
    return module.layer, module.matrix


def _held_experts(module: Module) -> slice | None:
    """The places of a module's experts on this rank; the first place without experts; or None."""
    if not isinstance(module.layer, Experts):
        return slice(0, 1)
    if module.expert is None:
        return slice(0, module.layer.num_own)
    place, here = module.expert - module.layer.experts.start, module.layer.num_own
    return slice(place, place + 1) if 0 <= place < here else None
