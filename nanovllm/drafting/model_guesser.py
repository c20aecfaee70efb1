"""ModelGuesser: a model draws drafts one after the other, in the step that verifies them.

It reads the device table and writes drafts into it, without waiting for anything, so that the same
code runs in CUDA graphs. The draft model's layers have their own keys and values, in a pool with
the block numbers of the large model's pool. The keys of wrong drafts are overwritten in the next
steps.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from nanovllm.drafting.guesser import Guesser
from nanovllm.engine.cache.groups import CacheGroups, single_group
from nanovllm.engine.cache.pools import KVPool
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context, attending
from nanovllm.layers.sampler import Sampler


class Places(NamedTuple):
    """The positions and slots of queries, and how many tokens they attend to."""

    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor


class ModelGuesser(Guesser):
    """The common part of draft models and heads.

    Each guess returns `states` for the next guess, which only a head reads.
    """

    kept: Kept | None = None  # the states that a head reads
    sees_all_steps = False  # False: it sees only steps with drafts
    make_pool = KVPool

    def __init__(self, layers: list[Attention], placement: Placement) -> None:
        self.backend, self.ranks = placement.backend, placement.ranks
        self.pool = self.make_pool(
            single_group(layers), placement.block_size, placement.kv_dtype, placement.device
        )
        self.pools = (self.pool,)
        self.sampler = Sampler(placement.backend.kernels)

    def check(self, groups: CacheGroups) -> None:
        """Raise a ValueError if its pool cannot share the blocks of these groups."""
        if groups.block_parts[:1] == (1,):
            return
        needs = "whose layers without a window have the largest rows of keys or latents"
        if not groups.groups:
            needs = "with attention layers, whose blocks its own keys and values share"
        raise ValueError(f"speculative_config: a {self.label} needs a model {needs}")

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, and store the keys of new positions.

        Each draft is drawn with the temperature of its sequence, and with the key that the large
        model will use at its position.
        """
        num_seqs, num_queries = size[:2]
        if num_queries == 1 and not self.sees_all_steps:
            return
        inputs = self.backend.kernels.guess_inputs(
            table, self.kept, num_seqs, num_queries, self.pool.block_size
        )
        if num_queries == 1:
            self.store(inputs)
            return
        later = zip(inputs.later_positions, inputs.later_slots, inputs.later_lens, strict=True)
        logits, states = self.begin(inputs)
        drafts = [self._draw(logits, inputs.temperatures, inputs.keys[0])]
        for key, places in list(zip(inputs.keys, later, strict=True))[1:]:
            logits, states = self.go_on(drafts[-1], Places(*places), states, inputs)
            drafts.append(self._draw(logits, inputs.temperatures, key))
        rows, tokens = table.batch[:num_seqs].long(), torch.stack(drafts, 1).int()
        has_place = inputs.later_lens.t() > 0
        table.drafts.tokens[rows, : num_queries - 1] = tokens.where(has_place, NO_DRAFT)

    def store(self, inputs: GuessInputs) -> None:
        """Store the keys of new positions, in a step without drafts."""

    def begin(self, inputs: GuessInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [B, V] of each row's first draft, and states."""
        raise NotImplementedError

    def go_on(
        self, drafts: torch.Tensor, places: Places, states: torch.Tensor, inputs: GuessInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the drafts after these ones [B], and states."""
        raise NotImplementedError

    def attending(self, places: Places, inputs: GuessInputs) -> AbstractContextManager[None]:
        """A context to compute one or more positions of each row."""
        context = Context(
            is_prefill=False,
            slot_mapping=places.slots,
            context_lens=places.context_lens,
            block_tables=inputs.block_tables,
            num_queries=len(places.slots) // len(inputs.block_tables),
        )
        return attending(context, self.backend.attention)

    def _draw(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """The tokens [B] that rank 0 draws, on every rank; 0 where no token can be drawn."""
        if self.ranks.rank == 0:
            return self.ranks.broadcast(self.sampler(logits, temperatures, keys).clamp_(min=0))
        return self.ranks.broadcast(torch.empty_like(keys))
