"""DraftModelGuesser: a smaller model with the same tokens draws drafts.

In a step with drafts it reads a sequence's last token, and the token before it if that was a draft.
Prompts and the tokens of steps without drafts are missing then: the host lets it compute them first
(`catch_up`).
"""

import torch

from nanovllm.drafting.catch_up import warm_up_step
from nanovllm.drafting.model_guesser import ModelGuesser, Places
from nanovllm.engine.cache.pools import KVPool
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.guess_inputs import GuessInputs
from nanovllm.layers.cache_spec import State
from nanovllm.layers.context import Context, attending
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.model_size import WeightBytes, step_weight_bytes


def step_bytes(config: ModelConfig, placement: Placement) -> float:
    """The bytes of a model's weights that a step of one token reads, on all ranks together."""
    sizes = WeightBytes(placement.dtype.itemsize, config.quantization)
    return step_weight_bytes(config, sizes, rows=1)


class RecordedPool(KVPool):
    """A draft model's KV pool; `DraftedBlocks` records which tokens its blocks have."""

    def copy(self, source: int, target: int) -> None:
        """Do nothing: a fork's block is not recorded as a copy, so the draft model computes it."""


class DraftModelGuesser(ModelGuesser):
    """A draft model and its KV pool.

    It draws only tokens of the large model, which has `vocab_size` tokens. In place of a token that
    the draft model does not have, it reads its own last id. The host asks for no drafts of
    sequences that are longer than the draft model's limit; if other sequences have drafts in the
    same step, the drafts of longer ones are useless.
    """

    label = "draft model"
    longest: int
    make_pool = RecordedPool

    def __init__(
        self, model: CausalLM, config: ModelConfig, placement: Placement, vocab_size: int
    ) -> None:
        caches = (cache for layer in config.layers for cache in layer.cache.each)
        if any(isinstance(cache, State) for cache in caches):
            raise ValueError("speculative_config: a draft model that keeps states is not supported")
        super().__init__(model.attentions, placement)
        self.models = ((config, model),)
        self.longest_window = config.longest_window
        self.longest = placement.max_positions
        self._model, self._vocab_size, self._own_size = model, vocab_size, config.vocab_size
        self.num_bytes = step_bytes(config, placement)

    def begin(self, inputs: GuessInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of each row's first draft."""
        new = Places(inputs.positions, inputs.slots, inputs.context_lens)
        return self._logits(inputs.next_ids, new, inputs, inputs.last)

    def go_on(
        self, drafts: torch.Tensor, places: Places, states: torch.Tensor, inputs: GuessInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the drafts after these ones."""
        del states
        return self._logits(drafts, places, inputs)

    def catch_up(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> None:
        """Store the keys of these tokens."""
        nothing = positions.new_empty(0)
        with attending(context, self.backend.attention):
            self._model(self._own(input_ids), positions, nothing)

    def warm_up_steps(self, inputs: StepInputs) -> list[StepInputs]:
        """A step for `catch_up` with a prefill's tokens."""
        assert inputs.prefill is not None
        return [warm_up_step(inputs.prefill, inputs.width, self.longest)]

    def _logits(
        self,
        ids: torch.Tensor,
        places: Places,
        inputs: GuessInputs,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = places.positions.clamp(max=self.longest - 1)
        with self.attending(places, inputs):
            hidden, _ = self._model(self._own(ids), positions)
        if rows is not None:
            hidden = hidden[rows]
        logits = self._model.compute_logits(hidden)
        if self._own_size > self._vocab_size:
            logits = logits[:, : self._vocab_size].contiguous()
        return logits, hidden

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.clamp(max=self._own_size - 1) if self._own_size < self._vocab_size else ids
