"""Captured prefills have fixed sizes: a step's arrays are padded, those of step parts too."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.transfer import Array

Fill = Callable[[Array], None]


class PrefillSize(NamedTuple):
    """T tokens of fewer than S sequences: the last one is unused, and has the padding's rows."""

    num_tokens: int
    num_seqs: int
    is_marked: bool = False


def aligned(words: int) -> int:
    """A number of 64-bit words after which the next array is aligned, as kernels expect it."""
    return words + words % 2


class PaddedPart(Protocol):
    """A part's arrays in captured prefills of one size: `words` of 64 bits, or one more."""

    words: int

    def filler(self, inputs: StepInputs) -> Fill | None:
        """What writes a step's arrays to the host's copy; None if they have no room there."""

    def read(self, words: torch.Tensor) -> Any:
        """The values that layers read, from the device's copy. Graphs capture this."""
