"""Decode steps captured as CUDA graphs, once for each of a ladder of batch sizes.

With speculation there are further ones, with several queries of each sequence.

A graph is the whole step: reading the device table, the model, logits, the draw, and storing the
tokens for the next step. Without CUDA, replaying a size calls the step, so that everything except
the capture runs, and is tested, anywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.engine.step.computed import Computed

MOST_DRAFTS = 256  # of a step: with more, even right ones take longer than they save


class Size(NamedTuple):
    """A decode graph's sequences, and queries of each."""

    num_seqs: int
    num_queries: int = 1

    @property
    def num_rows(self) -> int:
        """Queries of all sequences."""
        return self.num_seqs * self.num_queries


def batch_ladder(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 8, then every 16, and `largest` itself at the top.

    From 128 to 256 it is every 8: there large layers become bound by arithmetic, which padding
    adds to.
    """
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 8), *range(256, largest, 16))
    return [size for size in sizes if size < largest] + [largest]


def draft_sizes(most_drafts: int, largest: int) -> list[Size]:
    """Sizes to capture for steps with drafts: all, half, a quarter, ... of `most_drafts`."""
    sizes = []
    while most_drafts > 0:
        top = min(largest, MOST_DRAFTS // most_drafts)
        powers = [1 << exponent for exponent in range(top.bit_length())]
        sizes += [Size(num_seqs, 1 + most_drafts) for num_seqs in sorted({*powers, top})]
        most_drafts //= 2
    return sizes


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step(size, out)` computes the batch's first sequences, and writes their logits to `out`. A
    batch runs in the next larger size, padded with unused queries, which write nothing (slot -1)
    and attend to nothing (context length 0). The caller runs batches that fit no size eagerly.
    """

    def __init__(
        self,
        step: Callable[[Size, torch.Tensor], Computed],
        sizes: list[Size],
        logits: torch.Tensor,
    ) -> None:
        self.step = step
        self.sizes = sorted(sizes, key=lambda size: size.num_rows)
        self.logits = logits
        self.graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._fitting: dict[Size, Size | None] = {}

    def fitting(self, batch: Size) -> Size | None:
        """The smallest size that has room for the batch, if there is one.

        Steps with drafts and steps without have different graphs.
        """
        if batch not in self._fitting:
            fits = (
                size for size in self.sizes
                if size.num_seqs >= batch.num_seqs and size.num_queries >= batch.num_queries
                and (size.num_queries > 1) == (batch.num_queries > 1)
            )  # fmt: skip
            self._fitting[batch] = next(fits, None)
        return self._fitting[batch]

    def capture(self) -> None:
        """Capture every size, largest first, into one memory pool. CUDA only.

        The stream is created here: PyTorch's own stream for captures belongs to the first device.
        """
        device = self.logits.device
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for size in reversed(self.sizes):
            self.run(size)  # lazy initialization must not happen under capture
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                computed = self.run(size)
            self.graphs[size] = (graph, computed)

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(self, size: Size) -> Computed:
        """Run the step of the table's batch. The next replay overwrites what it returns."""
        if self.graphs:
            graph, computed = self.graphs[size]
            graph.replay()
        else:
            computed = self.run(size)
        return computed

    def run(self, size: Size) -> Computed:
        """Call the step for the first sequences of the batch."""
        return self.step(size, self.logits[: size.num_rows])
