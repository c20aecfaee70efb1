"""Guesser: what makes drafts on the device, at the beginning of the step that verifies them."""

from typing import Protocol

from nanovllm.engine.step_size import Size
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.table import Kernels
from nanovllm.speculative_config import SpeculativeConfig


class Guesser(Protocol):
    """Writes drafts to the device table. It runs in decode graphs, so it waits for nothing."""

    reads_history: bool  # whether the table must have all tokens of its rows

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, except those whose drafts are given."""


class NgramGuesser:
    """Guesses what came after a row's last tokens when they occurred before."""

    reads_history = True

    def __init__(self, kernels: Kernels, shortest: int, longest: int) -> None:
        self._guess = kernels.guess_ngrams
        self._shortest, self._longest = shortest, longest

    def guess(self, table: TableState, size: Size) -> None:
        """Write drafts for the batch's rows, except those whose drafts are given."""
        self._guess(table, size.num_seqs, size.num_queries - 1, self._shortest, self._longest)


def guesser_of(config: SpeculativeConfig | None, kernels: Kernels) -> Guesser | None:
    """The guesser that the option asks for; None if the host makes the drafts."""
    if config is None or config.method != "ngram":
        return None
    return NgramGuesser(kernels, config.prompt_lookup_min, config.prompt_lookup_max)
