"""Guesser: what makes drafts on the device, at the beginning of the step that verifies them."""

from collections.abc import Sequence

import torch

from nanovllm.engine.cache.kv_pool import KVPool
from nanovllm.engine.run.step_inputs import PrefillInputs
from nanovllm.engine.schedule.step_size import Size
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.table import Kernels
from nanovllm.layers.context import Context
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.speculative_config import SpeculativeConfig


class Guesser:
    """Writes drafts to the device table. It runs in decode graphs, so it waits for nothing.

    The base class makes none: it is for steps without drafts.
    """

    name = "guesser"  # in messages
    reads_history = False  # whether it needs all tokens of a row in the table
    reads_residuals = False  # whether it sees every step; else only steps with drafts
    longest: int | None = None  # the most tokens of a sequence that it computes when it catches up
    num_bytes = 0.0  # the weights that a draft reads, on all ranks together
    longest_window: int | None = 0  # how far back it attends; None for everything
    pools: Sequence[KVPool] = ()  # its KV, in blocks with the numbers of the model's
    model: tuple[ModelConfig, CausalLM] | None = None  # the draft model, if there is one

    def make_rows(self, num_rows: int) -> None:
        """Make room for what must be known of so many table rows."""

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows."""

    def keep(self, table: TableState, size: Size, residuals: list[torch.Tensor]) -> None:
        """Keep what the model has computed of a decode step's queries [B * Q]."""

    def prefill(
        self,
        table: TableState,
        inputs: PrefillInputs,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        residuals: list[torch.Tensor],
    ) -> None:
        """Keep what the model has computed of a prefill's tokens."""

    def catch_up(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> None:
        """Compute tokens that it has not seen."""


class NgramGuesser(Guesser):
    """Guesses what came after a row's last tokens when they occurred before."""

    name = "n-grams"
    reads_history = True

    def __init__(self, kernels: Kernels, shortest: int, longest: int) -> None:
        self._kernels = kernels
        self._shortest, self._longest = shortest, longest

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows."""
        self._kernels.guess_ngrams(
            table, size.num_seqs, size.num_queries - 1, self._shortest, self._longest
        )


def guesser_of(config: SpeculativeConfig | None, kernels: Kernels) -> Guesser:
    """The guesser that the option asks for; one with weights has to be loaded."""
    if config is None or config.method != "ngram":
        return Guesser()
    return NgramGuesser(kernels, config.prompt_lookup_min, config.prompt_lookup_max)
