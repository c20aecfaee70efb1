"""MaskedDraws: draws the tokens of a decode graph again for rows with masks.

Such a draw is also a graph: launching its few kernels one by one takes the host longer than the
device needs to run them.
"""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.redraws import Captured
from nanovllm.engine.run.transfer import upload_ahead
from nanovllm.engine.run.upload_stream import uploading
from nanovllm.kernels.integers import cdiv
from nanovllm.layers.filters import Filters
from nanovllm.structured.masks import WORD

Draw = Callable[[Computed, torch.Tensor, torch.Tensor], Computed]


class MaskedDraws:
    """Draws for steps of up to `num_rows` rows.

    `draw(computed, rows, masks)` draws the tokens of `rows` [B] with masks [B, W], except for rows
    of -1, and stores all tokens of the step for the next one. A draw that was not captured is
    called, as are all draws without CUDA.
    """

    def __init__(self, draw: Draw, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._draw, self._device = draw, device
        self._rows = torch.full((num_rows,), -1, device=device)
        num_words = cdiv(vocab_size, WORD)
        self._masks = torch.zeros(num_rows, num_words, dtype=torch.int32, device=device)
        self._rows_on_host: list[int] | None = []
        self._captured: dict[torch.Tensor, Captured] = {}  # by the tokens that it replaces
        self._drawn: torch.cuda.Event | None = None  # after the last draw

    def takes(self, filters: list[Filters]) -> bool:
        """Whether rows have masks and no other filters, and masks cover the vocabulary."""
        if len(filters) != 1 or (masks := filters[0].sole_masks) is None:
            return False
        return masks.shape[1] == self._masks.shape[1]

    def capture(
        self, computed: Computed, capture: Callable[[Callable[[], Computed]], Captured]
    ) -> None:
        """Capture the draw of a graph's step."""
        assert computed.token_ids is not None
        self._captured[computed.token_ids] = capture(lambda: self._run(computed))

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()

    def __call__(self, computed: Computed, filters: list[Filters]) -> Computed:
        """Draw the rows of a graph's step that have masks, which are on the host."""
        assert computed.token_ids is not None and filters[0].masks is not None
        rows, masks = filters[0].rows, filters[0].masks
        self._upload(rows.tolist(), masks)
        if computed.token_ids in self._captured:
            graph, drawn = self._captured[computed.token_ids]
            graph.replay()
        else:
            drawn = self._run(computed)
        if self._device.type == "cuda":
            self._drawn = self._drawn or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._drawn.record()
        return drawn

    def _run(self, computed: Computed) -> Computed:
        number = len(computed.logits)
        return self._draw(computed, self._rows[:number], self._masks[:number])

    def _upload(self, rows: list[int], masks: torch.Tensor) -> None:
        """Copy what has changed, while the device still computes the step."""
        if rows != self._rows_on_host:
            padded = np.full(len(self._rows), -1)
            padded[: len(rows)] = rows
            (uploaded,) = upload_ahead(self._device, padded)
            self._rows_on_host = None  # in case of an interrupt
            self._rows.copy_(uploaded)
            self._rows_on_host = rows
        with uploading(self._device, after=self._drawn):
            self._masks[: len(masks)].copy_(masks, non_blocking=True)
