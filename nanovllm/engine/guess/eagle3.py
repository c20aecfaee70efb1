"""Eagle3Guesser: drafts of an EAGLE-3 head, made on the device in the step that verifies them.

It reads the device table, and writes drafts into it, without waiting for anything: the same code
runs in CUDA graphs.

The head's layer has keys and values of its own, in a pool with the block numbers of the model's.
Those of position j depend on the token at j + 1. So those of a sequence's last computed positions
are stored when the next step begins, which knows that token. Until then `kept` has what the model
has computed there. Keys and values of the drafts' own positions are overwritten in the next step.

B sequences, Q queries of the model for each.
"""

from typing import NamedTuple

import torch

from nanovllm.engine.kv_pool import KVPool
from nanovllm.engine.placement import Placement
from nanovllm.engine.step.inputs import PrefillInputs
from nanovllm.engine.step.transfer import upload_ahead
from nanovllm.engine.step_size import Size
from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
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
    """Where queries are: their positions, their slots, and how many tokens they attend to."""

    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor


class Eagle3Guesser:
    """A head, its KV pool, and for each table row what the model has computed in its last step."""

    reads_history = False
    kept: Kept  # from `make_rows` on

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
        self.most, self.dtype = 1 + placement.most_drafts, placement.dtype

    def make_rows(self, num_rows: int) -> None:
        """Make room for what must be known of so many table rows."""
        device, hidden_size = self.pool.device, self.head.fc.held.num_rows
        first, counts = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        states = torch.zeros(num_rows, self.most, hidden_size, dtype=self.dtype, device=device)
        self.kept = Kept(first, counts, states)

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, except those whose drafts are given.

        And store the keys of new positions. Each draft has the temperature of its sequence, and the
        key with which the model will draw there.
        """
        num_seqs, num_queries = size
        inputs = self.backend.kernels.guess_inputs(
            table, self.kept, num_seqs, num_queries, self.pool.block_size
        )
        embedded = self.embedding(inputs.next_ids)
        fused = self.kept.states.flatten(0, 1)[inputs.sources]
        if num_queries == 1:
            self.head.store(embedded, inputs.positions, fused, inputs.slots)
            return
        new = Places(inputs.positions, inputs.slots, inputs.context_lens)
        later = zip(inputs.later_positions, inputs.later_slots, inputs.later_lens, strict=True)
        normed, states = self._decode(embedded, new, fused, inputs, inputs.last)
        drafts = [self._draw(normed, inputs.temperatures, inputs.keys[0])]
        for key, places in list(zip(inputs.keys, later, strict=True))[1:]:
            embedded = self.embedding(drafts[-1])
            normed, states = self._decode(embedded, Places(*places), states, inputs)
            drafts.append(self._draw(normed, inputs.temperatures, key))
        rows, state = table.batch[:num_seqs].long(), table.drafts
        given, own = state.are_given[rows, None] > 0, state.tokens[rows, : num_queries - 1]
        state.tokens[rows, : num_queries - 1] = own.where(given, torch.stack(drafts, 1).int())

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep what the model has computed of its queries [B * Q]."""
        rows = table.batch[: size.num_seqs].long()
        fused = self.head.fuse(residuals).view(size.num_seqs, size.num_queries, -1)
        self.kept.states[rows, : size.num_queries] = fused

    def prefill(
        self,
        table: TableState,
        tokens: PrefillTokens,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Store the keys of a prefill's tokens, and keep what the samples' first guess reads.

        The last token of each prompt has no next one yet: its keys are stored again. A sequence
        that was decoded before keeps its new positions, and has one more.
        """
        assert context.cu_seqlens_q is not None
        input_ids, positions, samples = tokens.input_ids, tokens.positions, tokens.sample_rows
        last = context.cu_seqlens_q[1:].long() - 1
        next_ids = input_ids.roll(-1).index_copy(0, last, tokens.next_ids)
        fused, kept = self.head.fuse(residuals), self.kept
        self.head.store(self.embedding(next_ids), positions, fused, context.slot_mapping)
        here = positions[tokens.sampled]
        gap = here - kept.first[samples]
        is_first = torch.zeros_like(positions, dtype=torch.bool)
        is_first[context.cu_seqlens_q[:-1].long()] = True
        is_decoded = is_first[tokens.sampled]  # what a row has kept may be another sequence's
        follows = is_decoded & (gap > 0) & (gap <= kept.counts[samples]) & (gap < self.most)
        index = gap.where(follows, 0)
        before = (index - 1).clamp(min=0)
        table.drafts.recent[samples, before] = input_ids[tokens.sampled].int()
        kept.counts.index_fill_(0, tokens.rows, 0)
        kept.states[samples, index] = fused[tokens.sampled]
        kept.first[samples] = (here - index).int()
        kept.counts[samples] = (index + 1).int()

    def _decode(
        self,
        embedded: torch.Tensor,
        places: Places,
        fused: torch.Tensor,
        inputs: GuessInputs,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head makes of one or some positions of each sequence, or of `rows` of them."""
        tables = inputs.block_tables
        context = Context(
            is_prefill=False,
            slot_mapping=places.slots,
            context_lens=places.context_lens,
            block_tables=tables,
            num_queries=len(embedded) // len(tables),
        )
        self.backend.attention.plan(context)
        set_context(context)
        try:
            states: tuple[torch.Tensor, torch.Tensor]
            states = self.head(embedded, places.positions, fused, rows)
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
