"""MaskedDraws: tokens of decode graphs' steps drawn again, of those that masks allow.

They are graphs too, each captured when its step first needs it: the host takes longer to launch the
kernels of a draw one by one than the device takes to run them. Without CUDA the draw is called.
"""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.step.computed import Computed
from nanovllm.engine.step.transfer import upload_ahead, uploading

Draw = Callable[[Computed, torch.Tensor, torch.Tensor], Computed]


class MaskedDraws:
    """Draws for steps of up to `num_rows` rows.

    `draw(computed, rows, masks)` draws the tokens of `rows` [B] with masks [B, W], except where a
    row is -1, and stores all tokens of the step for the next one.
    """

    def __init__(self, draw: Draw, num_rows: int, device: torch.device) -> None:
        self._draw, self._num_rows, self._device = draw, num_rows, device
        self._inputs: tuple[torch.Tensor, torch.Tensor] | None = None  # where all draws read them
        self._rows: list[int] = []  # that are in the first of these
        self._graphs: dict[torch.Tensor, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._drawn: torch.cuda.Event | None = None  # what comes after the last draw

    def __call__(self, computed: Computed, rows: torch.Tensor, masks: torch.Tensor) -> Computed:
        """Draw the rows [R] of a graph's step with masks [R, W], which are on the host."""
        number = len(computed.logits)
        kept_rows, kept_masks = self._upload(rows.tolist(), masks)
        inputs = computed, kept_rows[:number], kept_masks[:number]
        if self._device.type == "cpu":
            return self._draw(*inputs)
        assert computed.token_ids is not None
        if computed.token_ids in self._graphs:
            graph, drawn = self._graphs[computed.token_ids]
            graph.replay()
        else:
            drawn = self._draw(*inputs)  # lazy initialization must not happen under capture
            self._graphs[computed.token_ids] = self._capture(*inputs)
        if self._drawn is None:
            self._drawn = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._drawn.record()
        return drawn

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _upload(self, rows: list[int], masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what has changed, while the device still computes the step."""
        if self._inputs is None:
            shape, device = (self._num_rows, masks.shape[1]), self._device
            empty = torch.empty(self._num_rows, dtype=torch.long, device=device)
            self._inputs = empty, torch.empty(shape, dtype=torch.int32, device=device)
        kept_rows, kept_masks = self._inputs
        if rows != self._rows:
            padded = np.full(self._num_rows, -1)
            padded[: len(rows)] = rows
            (uploaded,) = upload_ahead(self._device, padded)
            kept_rows.copy_(uploaded)
            self._rows = rows
        with uploading(self._device, after=self._drawn):
            kept_masks[: len(masks)].copy_(masks, non_blocking=True)
        return kept_rows, kept_masks

    def _capture(
        self, computed: Computed, rows: torch.Tensor, masks: torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, Computed]:
        """Capture the draw. It waits for nothing, and frees none of PyTorch's memory."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                drawn = self._draw(computed, rows, masks)
            finally:
                graph.capture_end()
        return graph, drawn
