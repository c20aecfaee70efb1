"""AdapterSlots: the memory of a rank's layers for adapters, and what is in it.

It does not know which requests use a slot.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from nanovllm.adapters.modules import Module, modules_of
from nanovllm.adapters.tensors import AdapterTensors, Pair
from nanovllm.kernels.low_rank import LowRank
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.weights.stored import Held
from nanovllm.models.decoder import CausalLM

Adapted = LinearBase | VocabParallelEmbedding | Experts


@dataclass(frozen=True)
class Room:
    """A matrix of a layer, with room for adapters: of `num_experts` ones if it has experts."""

    layer: Adapted
    matrix: str
    held: Held
    num_experts: int = 1

    def num_bytes(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
        """The memory of the adapters of all slots."""
        return self.make(num_slots, max_rank, dtype, torch.device("meta")).num_bytes

    def make(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> LowRank:
        """Empty slots for this rank's part of the matrix: nothing has an adapter."""
        held, groups = self.held, num_slots * self.num_experts
        parts = len(held.sizes)
        sizes = tuple(part.stop - part.start for part in held.rows)
        return LowRank(
            torch.zeros(groups, parts * max_rank, held.num_columns, dtype=dtype, device=device),
            torch.zeros(groups, max_rank, held.num_rows, dtype=dtype, device=device),
            torch.zeros(groups, parts, dtype=torch.int32, device=device),
            sizes,
        )


class AdapterSlots:
    """Gives the layers of a model room for `num_slots` adapters with ranks up to `max_rank`.

    Only the modules of some `kinds` if given. Peak memory: `num_bytes` on the model's device.
    """

    def __init__(
        self,
        model: CausalLM,
        num_slots: int,
        max_rank: int,
        kinds: Collection[str] | None = None,
    ) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.modules = modules_of(model, kinds)
        self._low_ranks: dict[tuple[Adapted, str], LowRank] = {}
        norm = model.model.norm.weight
        for room in _rooms(self.modules.values()):
            low_rank = room.make(num_slots, max_rank, norm.dtype, norm.device)
            self._low_ranks[room.layer, room.matrix] = low_rank
            if isinstance(room.layer, Experts):
                room.layer.low_ranks[room.matrix] = low_rank
            else:
                room.layer.low_rank = low_rank

    @property
    def num_bytes(self) -> int:
        """The memory of all slots on this rank."""
        return sum(low_rank.num_bytes for low_rank in self._low_ranks.values())

    @torch.inference_mode()
    def place(self, slot: int, adapter: AdapterTensors) -> None:
        """Copy this rank's parts of an adapter into a slot, instead of what was there.

        Copies from pinned memory may end later than this call, but before what the current stream
        does next.
        """
        assert 0 <= slot < self.num_slots
        ranks = self._no_ranks()
        for name, pair in adapter.pairs.items():
            assert pair.rank <= self.max_rank
            module = self.modules[name]
            if (expert := _held_expert(module)) is not None:
                self._place(slot, module, pair, expert, ranks)
        self._set_ranks(slot, ranks)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Let a slot have no adapter."""
        self._set_ranks(slot, self._no_ranks())

    def _place(
        self,
        slot: int,
        module: Module,
        pair: Pair,
        expert: int,
        ranks: dict[tuple[Adapted, str], torch.Tensor],
    ) -> None:
        assert isinstance(module.layer, Adapted)
        key = module.layer, module.matrix
        low_rank, own = self._low_ranks[key], ranks[key]
        group, held = slot * len(own) + expert, module.held
        a = pair.a[:, held.columns]
        sizes = [held.sizes[i] for i in module.projections]
        for projection, b in zip(module.projections, torch.split(pair.b, sizes, 1), strict=True):
            own[expert, projection] = pair.rank
            first = projection * self.max_rank
            low_rank.a[group, first : first + pair.rank].copy_(a, non_blocking=True)
            columns = torch.split(low_rank.b[group], [*low_rank.sizes], 1)[projection]
            columns[: pair.rank].copy_(b[:, held.rows[projection]], non_blocking=True)

    def _no_ranks(self) -> dict[tuple[Adapted, str], torch.Tensor]:
        """Zeros for the ranks of a slot: [experts, projections] of each matrix, on the host."""
        return {
            key: torch.zeros(len(low_rank.ranks) // self.num_slots, low_rank.ranks.shape[1])
            for key, low_rank in self._low_ranks.items()
        }

    def _set_ranks(self, slot: int, ranks: dict[tuple[Adapted, str], torch.Tensor]) -> None:
        for key, own in ranks.items():
            first = slot * len(own)
            self._low_ranks[key].ranks[first : first + len(own)].copy_(own)


def adapter_bytes(
    model: CausalLM, num_slots: int, max_rank: int, kinds: Collection[str] | None = None
) -> int:
    """The memory that `AdapterSlots` with these arguments takes on this rank."""
    dtype = model.model.norm.weight.dtype
    rooms = _rooms(modules_of(model, kinds).values())
    return sum(room.num_bytes(num_slots, max_rank, dtype) for room in rooms)


def _rooms(modules: Collection[Module]) -> Iterator[Room]:
    """The matrices of which modules are parts, each once."""
    seen = set()
    for module in modules:
        layer = module.layer
        assert isinstance(layer, Adapted)
        if (layer, module.matrix) not in seen:
            seen.add((layer, module.matrix))
            held = layer.num_held if isinstance(layer, Experts) else 1
            yield Room(layer, module.matrix, module.held, held)


def _held_expert(module: Module) -> int | None:
    """The place of a module's expert among this rank's; 0 without experts, None if not here."""
    if module.expert is None:
        return 0
    here = module.layer.experts
    assert isinstance(here, slice)
    return module.expert - here.start if here.start <= module.expert < here.stop else None
