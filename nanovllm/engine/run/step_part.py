"""StepPart: what a feature adds to the steps of one rank. The base class adds nothing."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.engine.run.computed import REPORTED, ComputeLogits
from nanovllm.engine.run.device_table import UNMARKED, DeviceTable
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.read_table import Decoding

if TYPE_CHECKING:
    from nanovllm.engine.run.padded import PaddedPart, PrefillSize
    from nanovllm.engine.run.reports import Columns

TAKEN = "taken_tokens"  # the array of the tokens that a `HiddenReader` asks for


class StepPart:
    """A feature's part of every step: host arrays, values for layers, results from hidden states.

    Rank 0 adds arrays, which travel to all ranks under their names. On every rank the part makes
    from them the values that layers read under the part's `name`. It may take hidden states of a
    prefill. All ranks have equal parts, and call the same methods in the same order.
    """

    name = ""
    marks_rows = False  # whether the part reads the marks of sequences; at most one does

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Add host arrays to the inputs of a batch's step. On rank 0."""

    def mark_of(self, seq: Sequence) -> int:  # noqa: ARG002
        """The mark of a running sequence, for its row in the device table. On rank 0."""
        return UNMARKED

    def sizes(
        self,
        placement: Placement,  # noqa: ARG002
        largest: int,  # noqa: ARG002
        others: list[Size],  # noqa: ARG002
    ) -> list[Size]:
        """Decode steps to capture for up to `largest` sequences, in addition to the `others`."""
        return []

    def before(self, inputs: StepInputs) -> None:
        """Launch the part's work before a step."""

    def after(self, inputs: StepInputs) -> None:
        """Launch the part's work after a step."""

    def in_prefill(self, inputs: StepInputs, tokens: Array | None = None) -> Any:  # noqa: ARG002
        """The values that layers read in a prefill; with `tokens`, those for the head."""
        return None

    def in_decode(
        self,
        table: DeviceTable,  # noqa: ARG002
        size: Size,  # noqa: ARG002
        decoding: Decoding,  # noqa: ARG002
    ) -> Any:
        """The values that layers read in a decode step, or None. Decode graphs capture this."""
        return None

    def padded(self, size: "PrefillSize") -> "PaddedPart | None":  # noqa: ARG002
        """What layers read in captured prefills of this size, in place of `in_prefill`."""
        return None

    def tokens(self, inputs: StepInputs) -> Array | None:  # noqa: ARG002
        """The tokens of a prefill for which `take` gets hidden states; None for no token."""
        return None

    def take(
        self,
        hidden: torch.Tensor,
        inputs: StepInputs,  # noqa: ARG002
        compute_logits: ComputeLogits,  # noqa: ARG002
    ) -> Any:
        """Make a result from the hidden states [N, hidden] of the part's tokens."""
        return hidden

    def close(self) -> None:
        """Free the part's memory; the part is not used again."""


def own_methods(parts: Iterable[StepPart], name: str) -> list[Callable[..., None]]:
    """The methods of this name that parts override; the base class's do nothing."""
    nothing = getattr(StepPart, name)
    return [getattr(part, name) for part in parts if getattr(type(part), name) is not nothing]


class TakenHidden(StepPart):
    """Takes the hidden states that a `HiddenReader` asks for, as they are."""

    name = "hidden"

    def tokens(self, inputs: StepInputs) -> Array | None:
        """The tokens that the reader has asked for."""
        return inputs.arrays.get(TAKEN)


class PromptReports(StepPart):
    """Reports the log-probabilities of prompts' tokens that sequences wait for.

    All ranks compute the logits; the rank that `is_first`, rank 0, makes the reports.
    """

    name = "prompt_reports"

    def __init__(self, vocab_size: int, is_first: bool) -> None:
        self._vocab_size, self._is_first = vocab_size, is_first

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Add the tokens of a prefill with reports, and the ids to report for each."""
        if inputs.prefill is not None and any(seq.parts.first_wanted for seq in batch.seqs):
            from nanovllm.engine.run.reports import report_arrays

            inputs.arrays |= report_arrays(batch.seqs, inputs.prefill.cu_seqlens_q)

    def tokens(self, inputs: StepInputs) -> Array | None:
        """The tokens with reports."""
        return inputs.arrays.get(REPORTED)

    def take(
        self, hidden: torch.Tensor, inputs: StepInputs, compute_logits: ComputeLogits
    ) -> "tuple[Columns, ...]":
        """The columns of the reports, in flight; none on other ranks than the first."""
        from nanovllm.engine.run.logprobs import prompt_columns

        arrays = inputs.arrays
        return prompt_columns(hidden, arrays, compute_logits, self._vocab_size, self._is_first)
