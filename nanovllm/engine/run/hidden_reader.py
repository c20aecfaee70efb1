"""HiddenReader: what takes hidden states from a step to the sequences that keep them."""

from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence


class HiddenReader(Protocol):
    """Made when a request first keeps hidden states; on rank 0 alone."""

    def asked(self, batch: Batch) -> list[Any]:
        """What sequences want of a prefill's tokens; empty if they want nothing."""

    def tokens(self, batch: Batch, asked: list[Any], q_ends: Array) -> Array:
        """The tokens of the step that some sequence wants the hidden states of."""

    def keeps_drawn(self, seqs: list[Sequence]) -> bool:
        """Whether some sequences keep the hidden states that their next tokens are drawn from."""

    def launch(
        self, asked: list[Any], seqs: list[Sequence], offsets: list[int], computed: Computed
    ) -> Callable[[], None]:
        """Start the copies to the host. What is returned is called when they have arrived."""
