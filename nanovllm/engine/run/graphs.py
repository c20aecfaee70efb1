"""Decode steps captured as CUDA graphs, once for each of a ladder of batch sizes.

With speculation there are also graphs with several queries of each sequence.

A graph is the whole step: reading the device table, the model, logits, the draw, and storing the
tokens for the next step. Without CUDA, replaying a size calls the step, so that everything except
the capture runs, and is tested, anywhere.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.decode import Decodes, not_drawn
from nanovllm.engine.run.draws import Draws
from nanovllm.engine.run.graphed_shard import GraphedShard
from nanovllm.engine.run.redraws import Captured, Redraws
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start.placement import Placement
from nanovllm.layers.context import reading
from nanovllm.layers.ranks import Ranks

Result = TypeVar("Result")

MAX_GRAPH_BATCH = 512  # above it a step is long enough to launch its kernels one by one


class Capture:
    """Captures calls as CUDA graphs, all in one memory pool: one of them runs at a time.

    Lazy initialization must not happen under capture: each call runs once before, unless
    `are_loaded` says that all kernels are on the device. The stream is created here: PyTorch's own
    stream for captures belongs to the first device.
    """

    def __init__(self, device: torch.device, are_loaded: bool = False) -> None:
        self._device, self._are_loaded = device, are_loaded
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """The graph of a call, and its result, which each replay overwrites."""
        if not self._are_loaded:
            run()
            torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        where = self._pool, self._stream
        with torch.cuda.graph(graph, *where, capture_error_mode="thread_local"):
            return graph, run()


class DecodeGraphs:
    """The decode step for every size of a ladder.

    `step(size, out)` computes the batch's first sequences, and writes their logits to `out`. A
    batch runs in the next larger size, padded with unused queries, which write nothing (slot -1)
    and attend to nothing (context length 0). The caller runs batches that fit no size eagerly.
    `redraws` may draw tokens again, if this rank draws alone.
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
        """The smallest captured size that fits the batch, if there is one."""
        if batch not in self._fitting:
            self._fitting[batch] = next((size for size in self.sizes if size.holds(batch)), None)
        return self._fitting[batch]

    def capture(self, capture: Capture, one_in: int = 1) -> None:
        """Capture one in `one_in` sizes, largest first."""
        for size in self.sizes[::-one_in]:
            self.graphs[size] = capture(functools.partial(self.run, size))
            if self.redraws is not None:
                self.redraws.capture(self.graphs[size][1], capture)

    def release(self) -> None:
        """Free the captured graphs, even if this object is still referenced."""
        if self.redraws is not None:
            self.redraws.release()
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def replay(self, size: Size) -> Computed:
        """Run the step of the table's batch. The next replay overwrites the returned tensors."""
        if self.graphs:
            graph, computed = self.graphs[size]
            graph.replay()
        else:
            computed = self.run(size)
        return computed

    def run(self, size: Size) -> Computed:
        """Call the step for the first sequences of the batch."""
        return self.step(size, self.logits[: size.num_rows])


class GraphStep:
    """A graph's decode step: writes logits to `out`, draws the tokens and stores them.

    Ranks draw together if they have kernels for it, each from its part of the logits. Otherwise
    rank 0 draws alone.
    """

    def __init__(self, decodes: Decodes, draws: Draws, ranks: Ranks) -> None:
        self.decodes, self.draws, self.ranks = decodes, draws, ranks

    def __call__(self, size: Size, out: torch.Tensor) -> Computed:
        """Launch the step of this size."""
        forward, width = self.decodes.forward, self.decodes.table.layout.max_blocks
        hidden, decoding, read = self.decodes.decode(size, width)
        if together := self.ranks.peer_kernels:
            with reading(read):
                logits = forward.model.lm_head.part(hidden, out)
            first = forward.model.lm_head.shard.start
            token_ids = together.sample(logits, decoding.temperatures, decoding.keys, first)
        elif self.ranks.rank > 0:
            forward.logits(hidden, read)
            return not_drawn(size, decoding, out)
        else:
            logits = forward.logits(hidden, read, out)
            token_ids = self.draws.sampler(logits, decoding.temperatures, decoding.keys)
        return self.draws.keep(not_drawn(size, decoding, logits), token_ids)


def decode_graphs(shard: GraphedShard, num_running: int) -> DecodeGraphs:
    """The decode steps of a shard in all sizes, not captured."""
    placement, draws = shard.placement, shard.draws
    ranks, device = placement.ranks, placement.device
    sizes, num_rows = graph_sizes(num_running, shard.parts, placement)
    columns = shard.model_config.vocab_size if ranks.rank == 0 else 0
    if ranks.peer_kernels:
        columns = shard.model.lm_head.rank_part.num_rows
    logits = torch.empty(num_rows, columns, dtype=placement.dtype, device=device)
    redraws, kernels = None, placement.backend.kernels

    def draw(computed: Computed, rows: torch.Tensor, masks: torch.Tensor) -> Computed:
        """Draw these rows of a step again, under `masks`, and store all tokens."""
        assert computed.token_ids is not None and computed.choices is not None
        tokens = computed.token_ids
        kernels.sample_masked(computed.logits, *computed.choices, rows, masks, tokens)
        return draws.keep(computed, tokens)

    if shard.make_redraws and ranks.rank == 0 and not ranks.peer_kernels:
        redraws = shard.make_redraws(draw, num_rows, shard.model_config.vocab_size, device)
    step = GraphStep(shard.decodes, draws, ranks)
    return DecodeGraphs(step, sizes, logits, redraws)


def graph_sizes(
    num_running: int, parts: Iterable[StepPart], placement: Placement
) -> tuple[list[Size], int]:
    """The decode steps to capture, for up to `num_running` sequences; the most rows in a step."""
    top = min(num_running, MAX_GRAPH_BATCH)
    of_parts: list[Size] = []
    for part in parts:
        of_parts += part.sizes(placement, top, of_parts)
    sizes = [*map(Size, batch_ladder(top)), *of_parts]
    return sizes, max(size.num_rows for size in sizes)


def batch_ladder(largest: int) -> list[int]:
    """Numbers of sequences to capture: 1, 2, 4, then every 4, and `largest` itself at the top.

    From 32 on it is every 16. From 128 to 256 it is every 8: there large layers become bound by
    arithmetic, and padding adds arithmetic.
    """
    sizes = (
        1, 2, *range(4, 32, 4), *range(32, 128, 16), *range(128, 256, 8),
        *range(256, largest, 16),
    )  # fmt: skip
    return [size for size in sizes if size < largest] + [largest]
