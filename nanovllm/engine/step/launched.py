"""Launched: a step that the device computes, and what will come of it."""

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.step.logprobs import Telling
from nanovllm.engine.step.transfer import download


class Launched:
    """Holds the token ids of `batch.sampling_seqs`, as a copy on its way to the host.

    It is made in the order of the device's work, and `wait` waits for it by an event: work
    that is launched after it goes on meanwhile. The memory that it goes to is its own.
    """

    def __init__(self, batch: Batch, token_ids: torch.Tensor, tellings: list[Telling]) -> None:
        self.batch = batch
        self.num_tokens = sum(seq.num_scheduled_tokens for seq in batch.seqs)
        self.tellings = tellings
        self._host = download(token_ids)
        self._copied: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def synchronize(self) -> None:
        """Wait until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> list[int]:
        """The token ids, when they are there. Tells sequences what was likely, too."""
        self.synchronize()
        for telling in self.tellings:
            telling.tell()
        token_ids: list[int] = self._host.tolist()
        return token_ids
