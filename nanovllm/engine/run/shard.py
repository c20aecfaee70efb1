"""Shard: one rank's part of the model, with its caches, its device table and its decode graphs.

Every rank has a shard and computes the same steps. Rank 0's shard draws the tokens, except where
ranks draw together in decode graphs. A shard knows no text, and does not decide who runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, TypeVar

import torch

from nanovllm.engine.cache.pools import CachePools
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.decode import Decodes
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.run.draw_inputs import DrawInputs
from nanovllm.engine.run.draws import Draws
from nanovllm.engine.run.forward import Forward
from nanovllm.engine.run.prefill import Prefills
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.run.step_part import PromptReports, StepPart, TakenHidden, own_methods
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.start.parts import MakeRedraws, SleepableMemory
from nanovllm.engine.start.placement import Placement, computing_on
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

if TYPE_CHECKING:
    from nanovllm.engine.run.graphs import DecodeGraphs
    from nanovllm.engine.run.prefill_graphs import PrefillGraphs
    from nanovllm.engine.run.reports import Columns

Part = TypeVar("Part", bound=StepPart)


class Shard:
    """One rank's part. Startup calls `make_table`, `caches.allocate` and `capture_graphs`.

    Steps run within `computing`, which also limits the CPU threads to `num_threads`, if given.
    `parts` are what features add to each step.
    """

    table: DeviceTable  # from `make_table` to `close`, as are the next three
    prefills: Prefills
    decodes: Decodes
    draws: Draws

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        placement: Placement,
        caches: CachePools,
        num_threads: int | None = None,
        drafting: DeviceDrafting | None = None,
        parts: Sequence[StepPart] = (),
        memory: SleepableMemory | None = None,
        make_redraws: MakeRedraws | None = None,
    ) -> None:
        self.model_config = model_config
        self.placement = placement
        self.ranks, self.device = placement.ranks, placement.device
        self.backend, self.block_size = placement.backend, placement.block_size
        self.drafting = drafting or DeviceDrafting()
        self.caches = caches
        self.forward = Forward(model, [group.attention for group in caches.groups.groups])
        reports = PromptReports(model_config.vocab_size, self.ranks.rank == 0)
        self.parts = [self.drafting, TakenHidden(), reports, *self.caches.step_parts(), *parts]
        self._add_arrays, self._before, self._after = (
            own_methods(self.parts, name) for name in ("add_arrays", "before", "after")
        )
        self.marking = next((part for part in self.parts if part.marks_rows), None)
        self.graphs: DecodeGraphs | None = None
        self.short_prefills: PrefillGraphs | None = None
        self.are_loaded = False
        self._num_threads = num_threads
        self.make_redraws = make_redraws
        self.memory = memory  # of weights and caches, if sleep can free it
        self.at_close: list[Callable[[], object]] = []

    @property
    def model(self) -> CausalLM:
        """The part of the model that this rank has."""
        return self.forward.model

    @property
    def models(self) -> list[tuple[ModelConfig, CausalLM]]:
        """The model, and the draft models."""
        return [(self.model_config, self.model), *self.drafting.models]

    def part(self, kind: type[Part]) -> Part:
        """The step part of this class, which must be there."""
        found = next((part for part in self.parts if isinstance(part, kind)), None)
        assert found is not None, f"no {kind.__name__}"
        return found

    def computing(self) -> AbstractContextManager[None]:
        """A context in which this rank computes."""
        return computing_on(self.device, self._num_threads)

    def make_table(self, num_running: int, max_model_len: int) -> None:
        """Make a device table for sequences of up to `max_model_len` tokens."""
        self._drop_table()
        layout = TableLayout(
            num_running, -(-max_model_len // self.block_size), self.block_size,
            self.placement.most_drafts, max_model_len if self.drafting.reads_history else 0,
            self.marking is not None, self.caches.groups.block_parts,
            self.caches.slots_per_sequence,
        )  # fmt: skip
        kernels, device = self.backend.kernels, self.device
        write = kernels.write_table if device.type == "cuda" else None
        self.table = table = DeviceTable(layout, device, write, self.ranks)
        self.drafting.make_rows(layout.num_rows)
        steps = self.forward, table, self.parts, self.drafting
        self.prefills = Prefills(*steps, device, self.caches.kv.copy)
        self.draws = Draws(table, kernels, device, self.model_config.vocab_size)
        self.decodes = Decodes(*steps, kernels)

    def _drop_table(self) -> None:
        if hasattr(self, "table"):
            del self.table, self.prefills, self.decodes, self.draws

    def add_arrays(self, inputs: StepInputs, batch: Batch) -> None:
        """Let the parts add their arrays to the inputs of a batch's step. On rank 0."""
        for add_arrays in self._add_arrays:
            add_arrays(inputs, batch)

    def compute(self, inputs: StepInputs) -> Computed:
        """Compute a step. It does not wait for the device, except with plain PyTorch's kernels."""
        for before in self._before:
            before(inputs)
        self.table.write(inputs.changes)
        if inputs.prefill is not None:
            computed = self.prefills.compute(inputs, self.short_prefills)
        else:
            computed = self._decode(inputs)
        for after in self._after:
            after(inputs)
        return computed

    def _decode(self, inputs: StepInputs) -> Computed:
        """A decode step, as a graph if one fits.

        If ranks draw together, rank 0 gathers the logits only where it needs them: then it may
        replace tokens that the ranks have drawn.
        """
        self.table.share()
        batch = Size(inputs.num_seqs, inputs.num_queries, inputs.is_marked)
        if self.graphs is None or inputs.keeps_hidden or not (size := self.graphs.fitting(batch)):
            return self.decodes.compute(inputs, batch)
        computed = self.graphs.replay(size)
        if self.ranks.peer_kernels is None:
            self.table.draws_alone()
        elif inputs.whole_logits:
            self.table.draws_alone()
            computed = computed._replace(logits=self.model.lm_head.gather(computed.logits))
        return computed

    def draw(
        self, computed: Computed, inputs: DrawInputs
    ) -> "tuple[torch.Tensor, tuple[Columns, ...]]":
        """The token ids of a step's samples, and their reports. On rank 0."""
        of_graph = self.graphs if computed.token_ids is not None else None
        return self.draws.draw(computed, inputs, of_graph.redraws if of_graph else None)

    def catch_up(self, inputs: StepInputs) -> None:
        """Let the device's drafting compute these tokens, which all ranks know."""
        self.table.write(inputs.changes)
        self.prefills.catch_up(inputs)

    def decode_graphs(self, num_running: int) -> "DecodeGraphs":
        """The decode steps of all sizes, not captured; they run on any device."""
        from nanovllm.engine.run.graphs import decode_graphs

        return decode_graphs(self, num_running)

    def capture_graphs(self, num_running: int, num_tokens: int, one_in: int = 1) -> None:
        """Capture decode steps and short prefills: one in `one_in` sizes of each."""
        from nanovllm.engine.run.prefill_graphs import captured_graphs

        self.graphs, self.short_prefills = captured_graphs(self, num_running, num_tokens, one_in)

    def drop_graphs(self) -> None:
        """Free the graphs and their memory."""
        for graphs in (self.graphs, self.short_prefills):
            if graphs is not None:
                graphs.release()
        self.graphs = self.short_prefills = None

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self, device_works: bool = True) -> None:
        """Free the device's memory; the shard cannot be used afterwards.

        Graphs go first: they use exchanges with other ranks. `return_memory` comes last, when the
        other ranks have ended.
        """
        if device_works:
            with suppress(RuntimeError):  # a device that has failed is left all the same
                self.synchronize()  # a step may be in flight
        self.drop_graphs()
        while self.at_close:
            self.at_close.pop()()
        try:
            for part in self.parts:
                part.close()
        finally:
            self._drop_table()
            self.drafting, self.parts, self.marking = DeviceDrafting(), [], None
            del self.forward, self.caches, self._add_arrays, self._before, self._after
            if self.memory is not None and device_works:
                with suppress(RuntimeError):
                    self.memory.close()

    def return_memory(self) -> None:
        """Return freed memory to the device, for other processes to use."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed keeps it
                torch.cuda.empty_cache()
