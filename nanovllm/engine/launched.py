"""Launched: a step that the device computes, and what will come of it."""

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.inputs import upload
from nanovllm.engine.logprobs import Telling
from nanovllm.engine.sequence import Sequence


class Launched:
    """Holds the token ids of `batch.sampling_seqs` on the device, and their copy on the host.

    The copy is made in the order of the device's work, and `wait` waits for it by an event: work
    that is launched after it goes on meanwhile. The memory that it goes to is its own.
    """

    def __init__(self, batch: Batch, token_ids: torch.Tensor, tellings: list[Telling]) -> None:
        self.batch = batch
        self.num_tokens = sum(seq.num_scheduled_tokens for seq in batch.seqs)
        self.token_ids = token_ids
        self.tellings = tellings
        self._host = token_ids
        self._copied: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def fill(self, input_ids: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
        """The next step's `input_ids` [B], one for each of `seqs`, with those that this one yields.

        Stays on the device.
        """
        places = {seq.seq_id: place for place, seq in enumerate(self.batch.sampling_seqs)}
        rows = [row for row, seq in enumerate(seqs) if seq.num_pending_tokens]
        sources = [places[seqs[row].seq_id] for row in rows]
        if sources == list(range(len(input_ids))) == list(range(len(self.token_ids))):
            return self.token_ids
        device = input_ids.device
        tokens = self.token_ids[upload(np.array(sources, np.int64), device)]
        return input_ids.index_copy(0, upload(np.array(rows, np.int64), device), tokens)

    def synchronize(self) -> None:
        """Wait until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> list[int]:
        """The token ids, when they are there. Tells sequences what was likely, too."""
        self.synchronize()
        for tell in self.tellings:
            tell()
        token_ids: list[int] = self._host.tolist()
        return token_ids
