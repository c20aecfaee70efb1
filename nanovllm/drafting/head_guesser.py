"""HeadGuesser: a head draws drafts. It reads what the model itself computes.

The head's keys and values of position j depend on the token at j + 1. Only the next step knows that
token: when it begins, it stores the keys and values of a sequence's last computed positions. Until
then `kept` has the model's states at these positions.

B sequences, Q queries of the model for each.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.drafting.model_guesser import ModelGuesser, Places
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.transfer import upload_ahead
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM


class Head(Protocol):
    """Guesses a model's next tokens, by what the model has computed at a position.

    `fuse` makes one state of that. To guess the token at j + 2, the head reads the state of
    position j and the embedding of the token at j + 1. For later drafts, its own output takes the
    place of states that the model has not computed yet.
    """

    hidden_size: int  # of a state
    embed_tokens: VocabParallelEmbedding | None  # None: the model's

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer, in order."""

    def fuse(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """The states [T, hidden] of what the model has computed."""

    def guess(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed outputs of states at positions [T] and the next tokens embedded, and next states.

        With `rows`, both results have only these rows.
        """

    def store(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the keys and values of positions, without attention."""

    def compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] over the model's vocabulary on rank 0; a part of them on others."""


class PrefillTokens(NamedTuple):
    """T tokens of B sequences in a prefill. Samples are drawn after some of them."""

    rows: torch.Tensor  # [B] in int64, as are the others: the sequences' rows in the table
    next_ids: torch.Tensor  # [B]: the token after a sequence's last one; any token if unknown
    sampled: torch.Tensor  # [samples]: which of the T tokens
    sample_rows: torch.Tensor  # [samples]: the rows of the samples

    @classmethod
    def upload(cls, inputs: StepInputs, device: torch.device) -> "PrefillTokens":
        """Copy a head's inputs for a prefill to the device. A warm-up has no next tokens."""
        prefill = inputs.prefill
        assert prefill is not None
        sampled = prefill.tokens_of_samples()
        next_tokens = inputs.arrays.get("next_tokens")
        if next_tokens is None:
            next_tokens = np.zeros(len(prefill.cu_seqlens_q) - 1, np.int64)
        arrays = prefill.table_rows, next_tokens, sampled, prefill.sample_table_rows
        return cls(*upload_ahead(device, *arrays))


class HeadGuesser(ModelGuesser):
    """A head, its KV pool, and the model's states of each table row in the last step.

    `models` has the head if it is made of a model's blocks.
    """

    label = "head"
    sees_all_steps = True
    longest_window = None
    kept: Kept  # from `make_rows` on

    def __init__(
        self,
        head: Head,
        embedding: VocabParallelEmbedding,
        placement: Placement,
        num_bytes: float = 0.0,
        models: Sequence[tuple[ModelConfig, CausalLM]] = (),
    ) -> None:
        super().__init__(head.attentions, placement)
        self.head, self.embedding = head, head.embed_tokens or embedding
        self.models = (*models,)
        self.num_bytes = num_bytes
        self.most, self.dtype = 1 + placement.most_drafts, placement.dtype

    def make_rows(self, num_rows: int) -> None:
        """Allocate the kept states of `num_rows` table rows."""
        device, hidden_size = self.pool.device, self.head.hidden_size
        first, counts = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        states = torch.zeros(num_rows, self.most, hidden_size, dtype=self.dtype, device=device)
        self.kept = Kept(first, counts, states)

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Add the token after each sequence's scheduled ones in a prefill; 0 at a prompt's end."""
        if inputs.prefill is None:
            return
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in batch.seqs]
        known = (
            seq.token_ids[end] if end < len(seq.token_ids) else 0
            for seq, end in zip(batch.seqs, ends, strict=True)
        )  # fmt: skip
        inputs.arrays["next_tokens"] = np.fromiter(known, np.int64, len(ends))

    def store(self, inputs: GuessInputs) -> None:
        """Store the keys of new positions, in a step without drafts."""
        self.head.store(*self._first(inputs), inputs.slots)

    def begin(self, inputs: GuessInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of each row's first draft, and states in place of the model's."""
        new = Places(inputs.positions, inputs.slots, inputs.context_lens)
        with self.attending(new, inputs):
            normed, states = self.head.guess(*self._first(inputs), inputs.last)
        return self.head.compute_logits(normed), states

    def go_on(
        self, drafts: torch.Tensor, places: Places, states: torch.Tensor, inputs: GuessInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the drafts after these ones, and states in place of the model's."""
        with self.attending(places, inputs):
            normed, states = self.head.guess(self.embedding(drafts), places.positions, states)
        return self.head.compute_logits(normed), states

    def _first(self, inputs: GuessInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next tokens embedded, the positions, and the kept states."""
        fused = self.kept.states.flatten(0, 1)[inputs.sources]
        return self.embedding(inputs.next_ids), inputs.positions, fused

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep the states of the model's queries [B * Q]."""
        rows = table.batch[: size.num_seqs].long()
        fused = self.head.fuse(residuals).view(size.num_seqs, size.num_queries, -1)
        self.kept.states[rows, : size.num_queries] = fused

    def prefill(
        self,
        table: TableState,
        inputs: StepInputs,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Store the keys of a prefill's tokens, and keep the states that the first guess reads.

        The next token after each prompt is not known yet: the last token's keys are stored again
        later. A sequence that was decoded before keeps its new positions, and has one more. One
        that draws nothing may be decoded next, if only its last token is left.
        """
        assert context.cu_seqlens_q is not None
        tokens = PrefillTokens.upload(inputs, input_ids.device)
        samples = tokens.sample_rows
        last = context.cu_seqlens_q[1:].long() - 1
        next_ids = input_ids.roll(-1).index_copy(0, last, tokens.next_ids)
        fused, kept = self.head.fuse(residuals), self.kept
        self.head.store(self.embedding(next_ids), positions, fused, context.slot_mapping)
        here = positions[tokens.sampled]
        gap = here - kept.first[samples]
        is_first = torch.zeros_like(positions, dtype=torch.bool)
        is_first[context.cu_seqlens_q[:-1].long()] = True
        is_decoded = is_first[tokens.sampled]  # a row's kept states may be another sequence's
        follows = is_decoded & (gap > 0) & (gap <= kept.counts[samples]) & (gap < self.most)
        index = gap.where(follows, 0)
        before = (index - 1).clamp(min=0)
        table.drafts.recent[samples, before] = input_ids[tokens.sampled].int()
        rows, ends = tokens.rows, last[: len(tokens.rows)]  # a warm-up may have no rows
        kept.states[rows, 0], kept.first[rows] = fused[ends], positions[ends].int()
        kept.counts.index_fill_(0, rows, 1)
        kept.states[samples, index] = fused[tokens.sampled]
        kept.first[samples] = (here - index).int()
        kept.counts[samples] = (index + 1).int()
