"""Eagle3Guesser: drafts of an EAGLE-3 head, made on the device in the step that verifies them.

It reads the device table, and writes drafts into it, without waiting for anything: the same code
runs in CUDA graphs.

The head's layer has keys and values of its own, in a pool with the block numbers of the model's.
Those of position j depend on the token at j + 1. So those of a sequence's last computed positions
are stored when the next step begins, which knows that token. Until then `fused` has what the model
has computed there. Keys and values of the drafts' own positions are overwritten in the next step.

B sequences, R positions of each that may be new, Q queries of the model for each.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from nanovllm.engine.kv_pool import KVPool
from nanovllm.engine.placement import Placement
from nanovllm.engine.step.inputs import PrefillInputs
from nanovllm.engine.step.transfer import upload_ahead
from nanovllm.engine.step_size import Size
from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.layers.context import Context, reset_context, set_context
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.models.eagle3 import Eagle3Head


class PrefillTokens(NamedTuple):
    """T tokens of B sequences, of which some are sampled from."""

    input_ids: torch.Tensor  # [T], as all in int64
    positions: torch.Tensor  # [T]
    rows: torch.Tensor  # [B]: the sequences' rows in the table
    next_ids: torch.Tensor  # [B]: the token after a sequence's last one; any, if it is not known
    sampled: torch.Tensor  # [samples]: which of the T tokens
    sample_rows: torch.Tensor  # [samples]: the rows that the samples go to

    @classmethod
    def upload(
        cls, prefill: PrefillInputs, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> "PrefillTokens":
        """What a head must know of a prefill, on the device of its tokens."""
        sampled = prefill.sampled_tokens
        assert sampled is not None and prefill.next_tokens is not None
        if prefill.shared_samples is not None:
            sampled = sampled[prefill.shared_samples]
        arrays = prefill.table_rows, prefill.next_tokens, sampled, prefill.sample_table_rows
        return cls(input_ids, positions, *upload_ahead(positions.device, *arrays))


class Places(NamedTuple):
    """Positions, where their keys are stored, -1 for none, and how many tokens they attend to."""

    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor


class Eagle3Guesser:
    """A head, its KV pool, and what it must know of each table row.

    The model's last step has computed `num_kept[row]` positions from `first[row]` on, or fewer, as
    wrong drafts do not count. `fused[row]` has what the head reads there.
    """

    reads_history = False
    fused: torch.Tensor  # [rows, R, hidden]
    first: torch.Tensor  # [rows] in int64
    num_kept: torch.Tensor  # [rows] in int64

    def __init__(
        self,
        head: Eagle3Head,
        embedding: VocabParallelEmbedding,
        placement: Placement,
        num_bytes: int = 0,
    ) -> None:
        self.head, self.embedding = head, head.embed_tokens or embedding
        self.num_bytes = num_bytes  # of the weights, which each draft reads
        self.backend, self.ranks = placement.backend, placement.ranks
        self.pool = KVPool(
            head.attentions, placement.block_size, head.midlayer.self_attn.head_dim,
            placement.kv_dtype, placement.device,
        )  # fmt: skip
        self.sampler = Sampler(placement.backend.kernels)
        self.num_places, self.dtype = 1 + placement.most_drafts, placement.dtype

    def make_rows(self, num_rows: int) -> None:
        """Make room for what must be known of so many table rows."""
        device, size = self.pool.device, self.head.fc.held.num_rows
        self.fused = torch.zeros(num_rows, self.num_places, size, dtype=self.dtype, device=device)
        self.first, self.num_kept = torch.zeros(2, num_rows, dtype=torch.long, device=device)

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, except those whose drafts are given.

        And store the keys of all its new positions. Each draft has the temperature of its sequence,
        and the key with which the model will draw there.
        """
        rows = table.batch[: size.num_seqs].long()
        lengths, token_ids = table.lengths[rows].long(), table.tokens[rows]
        seeds, temperatures = table.seeds[rows], table.temperatures[rows]
        state, tables = table.drafts, table.block_tables[rows]
        normed, states = self._store_new(table, rows, lengths, token_ids, tables)
        if size.num_queries == 1:
            return
        here = lengths[:, None] + torch.arange(size.num_queries - 1, device=rows.device)
        keys = noise_keys(seeds[:, None], here + 1).t().contiguous()
        is_used = (lengths >= 0)[:, None] & (here < state.limits[rows, None])
        places = self._places(here.where(is_used, -1), tables)
        columns = zip(*(x.t().contiguous() for x in places), strict=True)
        drafts = [self._draw(normed, temperatures, keys[0])]
        for key, place in zip(keys[1:], columns, strict=False):
            normed, states = self._decode(drafts[-1], Places(*place), states, tables)
            drafts.append(self._draw(normed, temperatures, key))
        given = state.are_given[rows, None] > 0
        own = state.tokens[rows, : size.num_queries - 1]
        state.tokens[rows, : size.num_queries - 1] = own.where(given, torch.stack(drafts, 1).int())

    def keep(
        self,
        table: TableState,
        size: Size,
        positions: torch.Tensor,
        residuals: list[torch.Tensor],
    ) -> None:
        """Keep what the model has computed of its queries [B * Q], at these positions."""
        rows = table.batch[: size.num_seqs].long()
        fused = self.head.fuse(residuals).view(size.num_seqs, size.num_queries, -1)
        self.fused[rows, : size.num_queries] = fused
        self.first[rows] = positions.view(size.num_seqs, -1)[:, 0]
        self.num_kept.index_fill_(0, rows, size.num_queries)

    def prefill(
        self,
        table: TableState,
        tokens: PrefillTokens,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Store the keys of a prefill's tokens, and keep what the samples' first guess reads.

        The last token of each prompt has no next one yet: its keys are stored again.
        """
        assert context.cu_seqlens_q is not None
        first, last = context.cu_seqlens_q[:-1].long(), context.cu_seqlens_q[1:].long() - 1
        input_ids, positions, rows = tokens.input_ids, tokens.positions, tokens.rows
        if context.block_tables is not None:  # some may have been decoded before
            begins, token_ids = positions[first], input_ids[first]
            self._store_new(table, rows, begins, token_ids, context.block_tables)
        next_ids = input_ids.roll(-1).index_copy(0, last, tokens.next_ids)
        fused = self.head.fuse(residuals)
        self._forward(next_ids, positions, fused, replace(context, plan=None))
        self.num_kept.index_fill_(0, rows, 0)
        samples = tokens.sample_rows
        self.fused[samples, 0] = fused[tokens.sampled]
        self.first[samples] = positions[tokens.sampled]
        self.num_kept.index_fill_(0, samples, 1)

    def _store_new(
        self,
        table: TableState,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        token_ids: torch.Tensor,
        tables: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys of the new positions of `rows` [B], which have the last `token_ids`.

        Returns what the head makes of the last ones. The tokens after the new positions are the
        drafts that were accepted, and then the row's last token.
        """
        index = torch.arange(self.num_places, device=rows.device)
        first = self.first[rows, None]
        num_new = lengths[:, None] - first
        num_new = num_new.where(num_new <= self.num_kept[rows, None], 0)
        recent = table.drafts.recent[rows].long()
        next_ids = recent.where(index < num_new - 1, token_ids[:, None]).flatten()
        places = self._places((first + index).where(index < num_new, -1), tables)
        places = Places(*(x.flatten() for x in places))
        fused = self.fused[rows].flatten(0, 1)
        normed, states = self._decode(next_ids, places, fused, tables)
        each = torch.arange(len(rows), device=rows.device) * self.num_places
        last = each + (num_new.flatten() - 1).clamp(min=0)
        return normed[last], states[last]

    def _places(self, here: torch.Tensor, tables: torch.Tensor) -> Places:
        """Where the positions `here` [B, any] are in the cache; -1 for none."""
        size, positions = self.pool.block_size, here.clamp(min=0)
        slots = tables.gather(1, positions // size).long() * size + positions % size
        return Places(positions, slots.where(here >= 0, -1), (here + 1).int())

    def _decode(
        self, next_ids: torch.Tensor, places: Places, fused: torch.Tensor, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one or some positions of each sequence."""
        context = Context(
            is_prefill=False,
            slot_mapping=places.slots,
            context_lens=places.context_lens,
            block_tables=tables,
            num_queries=len(next_ids) // len(tables),
        )
        return self._forward(next_ids, places.positions, fused, context)

    def _forward(
        self, next_ids: torch.Tensor, positions: torch.Tensor, fused: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.backend.attention.plan(context)
        set_context(context)
        try:
            states: tuple[torch.Tensor, torch.Tensor]
            states = self.head(self.embedding(next_ids), positions, fused)
            return states
        finally:
            reset_context()

    def _draw(
        self, normed: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """The tokens [B] that rank 0 draws, on every rank."""
        logits = self.head.compute_logits(normed)
        if self.ranks.rank == 0:
            return self.ranks.broadcast(self.sampler(logits, temperatures, keys))
        return self.ranks.broadcast(torch.empty_like(keys))
