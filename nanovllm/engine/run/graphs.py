"""Decode steps captured as CUDA graphs, once for each of a ladder of batch sizes.

With speculation there are further ones, with several queries of each sequence.

A graph is the whole step: reading the device table, the model, logits, the draw, and storing the
tokens for the next step. Without CUDA, replaying a size calls the step, so that everything except
the capture runs, and is tested, anywhere.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.decode import not_drawn
from nanovllm.engine.schedule.batch import Size

if TYPE_CHECKING:
    from nanovllm.engine.run.shard import Shard
    from nanovllm.layers.filters import Filters

MAX_GRAPH_BATCH = 512  # above it a step is long enough to launch its kernels one by one
Captured = tuple[torch.cuda.CUDAGraph, Computed]


class Redraws(Protocol):
    """What draws the tokens of a graph's step again, where a feature narrows the draw."""

    def takes(self, filters: "list[Filters]") -> bool:
        """Whether it draws with these filters."""

    def capture(
        self, computed: Computed, capture: Callable[[Callable[[], Computed]], Captured]
    ) -> None:
        """Capture the draw of a graph's step."""

    def release(self) -> None:
        """Free the captured graphs."""

    def __call__(self, computed: Computed, filters: "list[Filters]") -> Computed:
        """Draw some rows of a graph's step again."""


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step(size, out)` computes the batch's first sequences, and writes their logits to `out`. A
    batch runs in the next larger size, padded with unused queries, which write nothing (slot -1)
    and attend to nothing (context length 0). The caller runs batches that fit no size eagerly.
    `redraws`, if this rank draws alone, may draw tokens again.
    """

    def __init__(
        self,
        step: Callable[[Size, torch.Tensor], Computed],
        sizes: list[Size],
        logits: torch.Tensor,
        redraws: Redraws | None = None,
    ) -> None:
        self.step, self.redraws = step, redraws
        self.sizes = sorted(sizes, key=lambda size: size.num_rows)
        self.logits = logits
        self.graphs: dict[Size, Captured] = {}
        self._fitting: dict[Size, Size | None] = {}

    def fitting(self, batch: Size) -> Size | None:
        """The smallest size that holds the batch, if there is one."""
        if batch not in self._fitting:
            self._fitting[batch] = next((size for size in self.sizes if size.holds(batch)), None)
        return self._fitting[batch]

    def capture(self) -> None:
        """Capture every size, largest first, into one memory pool. CUDA only.

        The stream is created here: PyTorch's own stream for captures belongs to the first device.
        """
        device = self.logits.device
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def captured(run: Callable[[], Computed]) -> Captured:
            run()  # lazy initialization must not happen under capture
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                return graph, run()

        for size in reversed(self.sizes):
            self.graphs[size] = captured(functools.partial(self.run, size))
            if self.redraws is not None:
                self.redraws.capture(self.graphs[size][1], captured)

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        if self.redraws is not None:
            self.redraws.release()
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


def graphs_of(shard: "Shard", num_running: int) -> DecodeGraphs:
    """The graphs of a shard's decode steps, for up to `num_running` sequences. Not captured."""
    top = min(num_running, MAX_GRAPH_BATCH)
    of_parts: list[Size] = []
    for part in shard.parts:
        of_parts += part.sizes(shard.placement, top, of_parts)
    sizes = [*map(Size, batch_ladder(top)), *of_parts]
    num_rows = max(size.num_rows for size in sizes)
    columns = shard.vocab_size if shard.ranks.rank == 0 else 0
    if shard.ranks.peer_kernels:
        columns = shard.model.lm_head.rank_part.num_rows
    logits = torch.empty(num_rows, columns, dtype=shard.placement.dtype, device=shard.device)
    redraws = None
    if shard.make_redraws and shard.ranks.rank == 0 and not shard.ranks.peer_kernels:
        draw = shard.draws.draw_masked
        redraws = shard.make_redraws(draw, num_rows, shard.vocab_size, shard.device)
    return DecodeGraphs(functools.partial(graph_step, shard), sizes, logits, redraws)


def graph_step(shard: "Shard", size: Size, out: torch.Tensor) -> Computed:
    """A graph's decode step: logits go to `out`, and the tokens are drawn and kept.

    Ranks draw together if they have kernels for it, each from its part of the logits. Else rank 0
    draws alone.
    """
    forward, draws, ranks = shard.forward, shard.draws, shard.ranks
    hidden, decoding, read = shard.decodes.decode(size, shard.table.layout.max_blocks)
    if together := ranks.peer_kernels:
        logits = forward.part_of_logits(hidden, read, out)
        first = forward.model.lm_head.shard.start
        token_ids = together.sample(logits, decoding.temperatures, decoding.keys, first)
    elif ranks.rank > 0:
        forward.logits(hidden, read)
        return not_drawn(size, decoding, out)
    else:
        logits = forward.logits(hidden, read, out)
        token_ids = draws.sampler(logits, decoding.temperatures, decoding.keys)
    return draws.keep(not_drawn(size, decoding, logits), token_ids)


def batch_ladder(largest: int) -> list[int]:
    """Numbers of sequences to capture: 1, 2, 4, then every 4, and `largest` itself at the top.

    From 32 on it is every 16. From 128 to 256 it is every 8: there large layers become bound by
    arithmetic, which padding adds to.
    """
    sizes = (
        1, 2, *range(4, 32, 4), *range(32, 128, 16), *range(128, 256, 8),
        *range(256, largest, 16),
    )  # fmt: skip
    return [size for size in sizes if size < largest] + [largest]
