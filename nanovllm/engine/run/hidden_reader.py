"""HiddenReader: takes hidden states from a step to the sequences that keep them."""

from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence


class HiddenReader(Protocol):
    """Takes hidden states to sequences. Made on rank 0 when a request first keeps them."""

    def asked(self, batch: Batch) -> list[Any]:
        """The hidden states that sequences want of a prefill, in the reader's own form."""

    def tokens(self, batch: Batch, asked: list[Any], q_ends: Array) -> Array:
        """The step's tokens with hidden states that some sequence wants."""

    def keeps_drawn(self, seqs: list[Sequence]) -> bool:
        """Whether some sequences keep the hidden states that their next tokens are drawn from."""

    def launch(
        self, asked: list[Any], seqs: list[Sequence], offsets: list[int], computed: Computed
    ) -> Callable[[], None]:
        """Start the copies to the host. Returns a function to call when they have arrived."""
