"""Launched: a step that the device computes, and its results in flight to the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.transfer import download
from nanovllm.engine.schedule.batch import Batch

if TYPE_CHECKING:
    from nanovllm.engine.run.reports import Columns, Report


class Begun(NamedTuple):
    """A step that computes logits on the device, and the reports of its prompts."""

    batch: Batch
    num_tokens: int
    computed: Computed
    prompts: "list[Report]"
    asked: list[Any]  # the hidden states that a `HiddenReader` asks for


class Launched:
    """The token ids of `batch.sampling_seqs`, reports with their columns, and states, in flight.

    `wait` waits for an event on the stream; work that is launched later goes on meanwhile.
    """

    def __init__(
        self,
        begun: Begun,
        token_ids: torch.Tensor,
        reports: "list[Report]",
        columns: "tuple[Columns, ...]",
        keep: Callable[[], None] | None = None,
    ) -> None:
        self.batch, self.num_tokens = begun.batch, begun.num_tokens
        self._reports, self._columns, self._keep = reports, columns, keep
        self._host = download(token_ids)
        self._copied: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def synchronize(self) -> None:
        """Wait until the device has computed the step."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> list[int]:
        """Wait, give the sequences their log-probabilities and states; return the token ids."""
        self.synchronize()
        if self._reports:
            from nanovllm.engine.run.reports import deliver

            deliver(self._reports, self._columns)
        if self._keep is not None:
            self._keep()
        token_ids: list[int] = self._host.tolist()
        return token_ids
