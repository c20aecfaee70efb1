"""Eagle3Guesser: drafts of an EAGLE-3 head, made on the device in the step that verifies them.

It reads the device table, and writes drafts into it, without waiting for anything: the same code
runs in CUDA graphs.

The head's layer has keys and values of its own, in a pool with the block numbers of the model's.
Those of position j depend on the token at j + 1. So those of a sequence's last computed positions
are stored when the next step begins, which knows that token. Until then `fused` has what the model
had computed there. Keys and values of the drafts' own positions are overwritten in the next step.

B sequences, R positions of each that may be new, Q queries of the model for each.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.engine.kv_pool import KVPool
from nanovllm.engine.placement import Placement
from nanovllm.engine.step_size import Size
from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState
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


class Eagle3Guesser:
    """A head, its KV pool, and what it must know of each table row.

    The last `num_new[row]` positions before `ends[row]` have no keys yet. `fused[row]` has what the
    head reads there, of the first one first. It counts only while `ends` is the row's length.
    """

    fused: torch.Tensor  # [rows, R, hidden]
    num_new: torch.Tensor  # [rows] in int64
    ends: torch.Tensor  # [rows] in int64

    def __init__(
        self, head: Eagle3Head, embedding: VocabParallelEmbedding, placement: Placement
    ) -> None:
        self.head, self.embedding = head, head.embed_tokens or embedding
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
        self.num_new, self.ends = torch.zeros(2, num_rows, dtype=torch.long, device=device)

    def guess(self, table: TableState, size: Size, width: int) -> None:
        """Write the drafts of the batch into the table, and store the keys of its new positions.

        Block tables are the first `width` columns. Each draft has the temperature of its sequence,
        and the key with which the model will draw there.
        """
        rows = table.batch[: size.num_seqs].long()
        lengths, tables = table.lengths[rows].long(), table.block_tables[:, :width][rows]
        token_ids = table.tokens[rows]
        normed, states = self._store_new(table, rows, lengths, token_ids, tables)
        self.ends[rows] = lengths
        for index in range(size.num_queries - 1):
            if index:
                here = (lengths + index - 1).where(lengths >= 0, -1)
                normed, states = self._decode(token_ids, here, states, tables)
            keys = noise_keys(table.seeds[rows], lengths + index + 1)
            token_ids = self._draw(normed, table.temperatures[rows], keys)
            table.drafts[rows, index] = token_ids.where(lengths >= 0, NO_DRAFT).int()

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep what the model has computed of its queries [B * Q], once the table has advanced.

        Those that the table has advanced by count.
        """
        rows = table.batch[: size.num_seqs].long()
        fused = self.head.fuse(residuals).view(size.num_seqs, size.num_queries, -1)
        self.fused[rows, : size.num_queries] = fused
        ends = table.lengths[rows].long()
        self.num_new[rows] = ends - self.ends[rows]
        self.ends[rows] = ends

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
        input_ids, rows = tokens.input_ids, tokens.rows
        if context.block_tables is not None:
            begins = tokens.positions[first]
            self._store_new(table, rows, begins, input_ids[first], context.block_tables)
        next_ids = input_ids.roll(-1).index_copy(0, last, tokens.next_ids)
        fused = self.head.fuse(residuals)
        self._forward(next_ids, tokens.positions, fused, replace(context, plan=None))
        samples = tokens.sample_rows
        self.fused[samples, 0] = fused[tokens.sampled]
        self.num_new[samples], self.ends[samples] = 1, tokens.positions[tokens.sampled] + 1

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
        places = torch.arange(self.num_places, device=rows.device)
        num_new = self.num_new[rows].where(self.ends[rows] == lengths, 0)[:, None]
        accepted = F.pad(table.drafts[rows, : self.num_places - 1].long(), (0, 1))
        next_ids = accepted.where(places < num_new - 1, token_ids[:, None])
        here = (lengths[:, None] - num_new + places).where(places < num_new, -1)
        fused = self.fused[rows].flatten(0, 1)
        normed, states = self._decode(next_ids.flatten(), here.flatten(), fused, tables)
        each = torch.arange(len(rows), device=rows.device) * self.num_places
        last = each + (num_new.flatten() - 1).clamp(min=0)
        return normed[last], states[last]

    def _decode(
        self,
        next_ids: torch.Tensor,
        here: torch.Tensor,
        fused: torch.Tensor,
        tables: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one or some positions of each sequence, `here`: -1 for none."""
        size, num_queries = self.pool.block_size, len(here) // len(tables)
        here = here.where(here < tables.shape[1] * size, -1)
        positions = here.clamp(min=0)
        blocks = tables.long().gather(1, (positions // size).view(len(tables), -1)).flatten()
        if self.backend.attention.packs_few_queries:  # its decode has one query for each table
            tables, num_queries = tables.repeat_interleave(num_queries, dim=0), 1
        context = Context(
            is_prefill=False,
            slot_mapping=(blocks * size + positions % size).where(here >= 0, -1),
            context_lens=(here + 1).int(),
            block_tables=tables,
            num_queries=num_queries,
        )
        return self._forward(next_ids.where(here >= 0, 0), positions, fused, context)

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
