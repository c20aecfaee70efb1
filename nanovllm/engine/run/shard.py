"""Shard: one rank's part of the model, with its KV pool, its device table and its decode graphs.

Every rank has one and computes the same steps. Rank 0's draws the tokens, except in decode graphs
of ranks that draw together. It decides nothing about which sequences run, and knows no text.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import numpy as np
import torch

from nanovllm.engine.cache.groups import CacheGroups, divide
from nanovllm.engine.cache.kv_pool import KVPool
from nanovllm.engine.cache.pools import CachePools
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.run.draw_inputs import DrawInputs
from nanovllm.engine.run.graphs import DecodeGraphs
from nanovllm.engine.run.logprobs import drawn_columns, prompt_columns, rows_at_a_time
from nanovllm.engine.run.reports import Columns, ReportInputs
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs
from nanovllm.engine.run.transfer import Array, upload, upload_ahead, upload_all
from nanovllm.engine.schedule.step_size import Size, adapter_sizes, batch_ladder, draft_sizes
from nanovllm.engine.start.device import computing_on
from nanovllm.engine.start.parts import AdapterSlots, MakeRedraws, SleepableMemory
from nanovllm.engine.start.placement import Placement
from nanovllm.kernels.plain.read_table import Decoding, read_groups, read_slots
from nanovllm.layers.context import Context, StateStep, attending
from nanovllm.layers.lora import AdapterRows
from nanovllm.layers.sampler import Sampler
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

MAX_GRAPH_BATCH = 512  # above it a step is long enough to launch its kernels one by one


class Shard:
    """What all ranks do alike. Startup makes it: `make_table`, `pools.allocate`, `capture_graphs`.

    Steps run within `computing`, which also limits the CPU threads to `num_threads`, if given.
    """

    table: DeviceTable  # from `make_table` to `close`

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        placement: Placement,
        num_threads: int | None = None,
        drafting: DeviceDrafting | None = None,
        adapters: AdapterSlots | None = None,
        memory: SleepableMemory | None = None,
        make_redraws: MakeRedraws | None = None,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.placement = placement
        self.ranks, self.device = placement.ranks, placement.device
        self.backend, self.block_size = placement.backend, placement.block_size
        self.sampler = Sampler(self.backend.kernels)
        self.drafting = drafting or DeviceDrafting()
        groups = divide(model.attentions, placement.max_positions, self.drafting.longest_window)
        self.drafting.check(groups)
        self._attentions = [group.attention for group in groups.groups]
        self.pools = CachePools(
            groups, model.state_mixers, self.block_size, (placement.kv_dtype, placement.dtype),
            self.device, self.drafting.pools, 1 + placement.most_rejected,
            placement.caches_prefixes,
        )  # fmt: skip
        self.adapters = adapters
        self.graphs: DecodeGraphs | None = None
        self._tokens_are_shared = False  # whether all ranks have the table's last tokens
        self._num_threads = num_threads
        self._make_redraws = make_redraws
        self.memory = memory  # of weights and pools, if they can be freed and regained
        self.at_close: list[Callable[[], object]] = []

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.model_config.vocab_size

    @property
    def pool(self) -> KVPool:
        """The blocks of KV."""
        return self.pools.kv

    @property
    def groups(self) -> CacheGroups:
        """Which of the model's layers share block tables."""
        return self.pool.groups

    @property
    def models(self) -> list[tuple[ModelConfig, CausalLM]]:
        """The model, and one that drafts if there is one."""
        return [(self.model_config, self.model), *self.drafting.models]

    def computing(self) -> AbstractContextManager[None]:
        """What holds while this rank computes."""
        return computing_on(self.device, self._num_threads)

    def make_table(self, num_running: int, max_model_len: int) -> None:
        """Make a device table for sequences of up to `max_model_len` tokens."""
        self._drop_table()
        max_blocks = -(-max_model_len // self.block_size)
        longest = max_model_len if self.drafting.reads_history else 0
        layout = TableLayout(
            num_running, max_blocks, self.block_size, self.placement.most_drafts, longest,
            self.adapters is not None, self.groups.parts,
            self.pools.states.slots_per_sequence if self.pools.states else 0,
        )  # fmt: skip
        write = self.backend.kernels.write_table if self.device.type == "cuda" else None
        self.table = DeviceTable(layout, self.device, write)
        self.drafting.make_rows(layout.num_rows)

    def _drop_table(self) -> None:
        if hasattr(self, "table"):
            del self.table

    def compute(self, inputs: StepInputs) -> Computed:
        """Compute a step. It does not wait for the device, except with plain PyTorch's kernels."""
        if inputs.copied_before is not None or inputs.copied_after is not None:
            return self._compute_and_copy(inputs)
        self.table.write(inputs.changes)
        if inputs.prefill is not None:
            return self._compute_prefill(inputs)
        self.share_tokens()
        batch = Size(inputs.num_seqs, inputs.num_queries, inputs.adapts)
        keeps = inputs.keeps_hidden
        if self.graphs and not keeps and (size := self.graphs.fitting(batch)):
            return self._replay(self.graphs, size, inputs.whole_logits)
        self._tokens_are_shared = False
        hidden, decoding, adapters = self._decode(batch, inputs.width)
        logits = self.model.compute_logits(hidden, adapters=adapters)
        computed = _computed(batch, decoding, logits)
        return computed._replace(hidden=hidden) if keeps else computed

    def _compute_and_copy(self, inputs: StepInputs) -> Computed:
        """Compute a step, with copies of states before and after it."""
        before, after = inputs.copied_before, inputs.copied_after
        inputs.copied_before = inputs.copied_after = None
        if before is not None:
            self.pools.copy_states(before)
        computed = self.compute(inputs)
        if after is not None:
            self.pools.copy_states(after)
        return computed

    def _replay(self, graphs: DecodeGraphs, size: Size, whole_logits: bool) -> Computed:
        """A decode graph's step. If ranks draw together, rank 0 has all logits where it needs them.

        Then it may replace tokens that the ranks have drawn.
        """
        computed = graphs.replay(size)
        if self.ranks.peer_kernels is None:
            self._tokens_are_shared = False
        elif whole_logits:
            self._tokens_are_shared = False
            computed = computed._replace(logits=self.model.lm_head.gather(computed.logits))
        return computed

    def draw(
        self, computed: Computed, inputs: DrawInputs
    ) -> tuple[torch.Tensor, tuple[Columns, ...]]:
        """The token ids of a step's samples, and their reports. On rank 0.

        Of a decode step with drafts it is what `accept` returns.
        """
        if not inputs.num_samples:
            return torch.empty(0, dtype=torch.long, device=self.device), ()
        if computed.token_ids is not None and not inputs.filters and inputs.report is None:
            return computed.results(inputs.num_samples), ()
        if inputs.filters or inputs.report is not None:
            assert computed.logits.shape[1] == self.vocab_size, "a part of the vocabulary"
        redraws = self.graphs.redraws if self.graphs and computed.token_ids is not None else None
        if redraws is not None and redraws.takes(inputs.filters):
            computed = redraws(computed, inputs.filters)
        else:
            computed = self._draw(computed.first(inputs.num_samples), inputs)
        columns: tuple[Columns, ...] = ()
        if inputs.report is not None:
            assert computed.token_ids is not None
            columns = drawn_columns(computed.logits, computed.token_ids, inputs.report)
        return computed.results(inputs.num_samples), columns

    def _draw_masked(self, computed: Computed, rows: torch.Tensor, masks: torch.Tensor) -> Computed:
        """Draw these rows of a decode graph's step again, of what masks allow, and keep all."""
        assert computed.token_ids is not None and computed.choices is not None
        draw, tokens = self.backend.kernels.sample_masked, computed.token_ids
        draw(computed.logits, *computed.choices, rows, masks, tokens)
        return self._keep(computed, tokens)

    def _draw(self, computed: Computed, inputs: DrawInputs) -> Computed:
        """Draw the tokens that are not drawn yet, or that filters narrow."""
        if computed.token_ids is not None and not inputs.filters:
            return computed
        choices = self._choices(computed, inputs)
        filters = upload_all(inputs.filters, self.device) if inputs.filters else []
        return self._keep(
            computed, self.sampler(computed.logits, *choices, filters, computed.token_ids)
        )

    def _keep(self, computed: Computed, token_ids: torch.Tensor) -> Computed:
        """Leave the tokens that were drawn in the table, and what was accepted in `computed`."""
        if computed.decoding is None:
            self.table.keep_tokens(computed.table_rows, token_ids)
            return computed._replace(token_ids=token_ids)
        accept, queries = self.backend.kernels.accept, computed.num_queries
        outcome = accept(self.table.state, computed.decoding, token_ids, queries)
        return computed._replace(token_ids=token_ids, outcome=outcome)

    def _choices(
        self, computed: Computed, inputs: DrawInputs
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Temperatures and keys on the device; None if all rows are greedy."""
        if inputs.is_greedy:
            return None, None
        if computed.choices is not None:
            return computed.choices
        assert inputs.temperatures is not None and inputs.keys is not None
        return upload(inputs.temperatures, self.device), upload(inputs.keys, self.device)

    def share_tokens(self) -> None:
        """Let all ranks have the results of the last steps, if rank 0 alone has drawn some."""
        if self.ranks.size > 1 and not self._tokens_are_shared:
            self.ranks.broadcast(self.table.results)
        self._tokens_are_shared = True

    def _compute_prefill(self, inputs: StepInputs) -> Computed:
        prefill = inputs.prefill
        assert prefill is not None
        hidden = self.prefill_hidden(prefill, inputs.width, prefill.needed_tokens())
        if prefill.copied_blocks is not None:
            for source, target in prefill.copied_blocks.reshape(-1, 2).tolist():
                self.pool.copy(source, target)
        kept, hidden = hidden[: prefill.num_kept], hidden[prefill.num_kept :]
        columns = self._report_prompts(hidden[: prefill.num_reported], prefill, inputs.report)
        hidden = hidden[prefill.num_reported :]
        if prefill.shared_samples is not None:
            hidden = hidden.index_select(0, upload(prefill.shared_samples, self.device))
        logits = hidden
        if len(hidden):
            adapters = self._adapter_rows(prefill.sample_slots())
            logits = self.model.compute_logits(hidden, adapters=adapters)
            self._tokens_are_shared = False
        table_rows = upload(prefill.sample_table_rows, self.device)
        drawn_from = hidden if inputs.keeps_hidden else None
        return Computed(logits, table_rows, prompt_logprobs=columns, kept=kept, hidden=drawn_from)

    def _report_prompts(
        self, hidden: torch.Tensor, prefill: PrefillInputs, report: ReportInputs | None
    ) -> tuple[Columns, ...]:
        """The reports on prompts. All ranks compute the logits, a few rows at a time."""
        columns = []
        size, slots = rows_at_a_time(self.vocab_size), prefill.reported_slots()
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            adapters = self._adapter_rows(None if slots is None else slots[part])
            logits = self.model.compute_logits(hidden[part], adapters=adapters)
            if report is not None:
                columns.append(prompt_columns(logits, report, start))
        return tuple(columns)

    def catch_up(self, inputs: StepInputs) -> None:
        """Let a draft model compute tokens. All ranks have them."""
        self.table.write(inputs.changes)
        assert inputs.prefill is not None
        input_ids, positions, contexts = self._upload(inputs.prefill, inputs.width)
        self.drafting.catch_up(input_ids, positions, contexts[0])

    def prefill_hidden(
        self, prefill: PrefillInputs, width: int = 0, needed: Array | None = None
    ) -> torch.Tensor:
        """The hidden states of a prefill's tokens, or only of those `needed`.

        It reads block tables of `width` columns, or none if that is 0.
        """
        input_ids, positions, contexts = self._upload(prefill, width)
        rows = None if needed is None else upload_ahead(self.device, needed)[0]
        states = self._prefill_states(prefill)
        hidden, residuals = self._forward(input_ids, positions, contexts, rows, states)
        self.drafting.prefill(
            self.table.state, prefill, input_ids, positions, contexts[0], residuals
        )
        return hidden

    def _upload(
        self, prefill: PrefillInputs, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[Context]]:
        """A prefill's tokens, their positions and each cache group's metadata on the device."""
        input_ids, positions, slots, q_ends, k_ends = upload_ahead(
            self.device, prefill.input_ids, prefill.positions, prefill.slot_mapping,
            prefill.cu_seqlens_q, prefill.cu_seqlens_k,
        )  # fmt: skip
        pending = prefill.pending()
        if len(pending[0]):
            self.share_tokens()
            input_ids = self.table.fill_pending(input_ids, *upload_ahead(self.device, *pending))
        groups = slots.view(-1, len(input_ids)) if len(slots) else slots[None]
        tables: list[torch.Tensor | None] = [None] * len(groups)
        if width:
            (table_rows,) = upload_ahead(self.device, prefill.table_rows)
            tables = [
                table[:, :width].index_select(0, table_rows)
                for table in self.table.block_tables[: len(groups)]
            ]
        context = Context(
            is_prefill=True,
            slot_mapping=groups[0],
            cu_seqlens_q=q_ends,
            cu_seqlens_k=k_ends,
            max_seqlen_q=int(np.diff(prefill.cu_seqlens_q).max()),
            max_seqlen_k=int(np.diff(prefill.cu_seqlens_k).max()),
            block_tables=tables[0],
            adapters=self._adapter_rows(prefill.adapter_slots),
        )
        return input_ids, positions, _for_groups(context, groups[1:], tables[1:])

    def _prefill_states(self, prefill: PrefillInputs) -> StateStep | None:
        """Where a prefill finds and leaves states; a warm-up's leaves none."""
        if self.pools.states is None:
            return None
        before, after, ends = prefill.states_before, prefill.states_after, prefill.cu_seqlens_q
        if before is None or after is None:
            before, after = np.zeros(len(ends) - 1, np.int64), np.full(int(ends[-1]), -1)
        slots = upload_ahead(self.device, before, after)
        return StateStep(slots[0], slots[1], ends)

    def _adapter_rows(self, slots: Array | None) -> AdapterRows | None:
        """The adapters of rows with these slots; None if no row has one."""
        if slots is None or self.adapters is None:
            return None
        return self.adapters.rows(upload_ahead(self.device, slots)[0], self.backend.kernels)

    def _decode(self, size: Size, width: int) -> tuple[torch.Tensor, Decoding, AdapterRows | None]:
        """The hidden states of the table's batch, what was read from the table, and adapters."""
        self.drafting.guess(self.table.state, size)
        decoding = self.backend.kernels.read_table(
            self.table.state, size.num_seqs, width, self.block_size, size.num_queries
        )
        adapters = None
        if size.adapts and self.adapters is not None:
            adapters = self.adapters.rows(self.table.adapter_slots(size), self.backend.kernels)
        context = Context(
            is_prefill=False,
            slot_mapping=decoding.slot_mapping,
            context_lens=decoding.context_lens,
            block_tables=decoding.block_tables,
            num_queries=size.num_queries,
            adapters=adapters,
        )
        contexts = [context]
        if len(self.groups.groups) > 1:
            tables = self.table.block_tables[1:]
            more = read_groups(self.table.state, tables, decoding, self.block_size)
            contexts = _for_groups(context, *more)
        states = None
        if self.pools.states is not None:
            before, after = read_slots(self.table.state_slots, self.table.state, decoding)
            states = StateStep(before, after, num_queries=size.num_queries)
        hidden, residuals = self._forward(
            decoding.input_ids, decoding.positions, contexts, states=states
        )
        self.drafting.keep(self.table.state, size, residuals)
        return hidden, decoding, adapters

    def _decode_and_draw(self, size: Size, out: torch.Tensor) -> Computed:
        """A decode graph's step: logits go to `out`, and the tokens are drawn and kept.

        Ranks draw together if they have kernels for it, each from its part of the logits. Else rank
        0 draws alone.
        """
        hidden, decoding, adapters = self._decode(size, self.table.layout.max_blocks)
        head, together = self.model.lm_head, self.ranks.peer_kernels
        if together:
            logits = head.part(hidden, out, adapters)
            keys = decoding.temperatures, decoding.keys
            token_ids = together.sample(logits, *keys, head.shard.start)
        elif self.ranks.rank > 0:
            self.model.compute_logits(hidden, adapters=adapters)
            return _computed(size, decoding, out)
        else:
            logits = self.model.compute_logits(hidden, out, adapters)
            token_ids = self.sampler(logits, decoding.temperatures, decoding.keys)
        return self._keep(_computed(size, decoding, logits), token_ids)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        contexts: list[Context],
        rows: torch.Tensor | None = None,
        states: StateStep | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The hidden states of these tokens, or only of those at `rows`; the tapped residuals."""
        with attending(contexts, self._attentions, states):
            out: tuple[torch.Tensor, list[torch.Tensor]] = self.model(input_ids, positions, rows)
            return out

    def decode_graphs(self, num_running: int) -> DecodeGraphs:
        """The decode steps of a ladder, not captured; they run on any device."""
        top = min(num_running, MAX_GRAPH_BATCH)
        most_drafts = self.placement.most_drafts
        sizes = [*map(Size, batch_ladder(top)), *draft_sizes(most_drafts, top)]
        if self.adapters is not None:
            sizes += adapter_sizes(most_drafts, top)
        num_rows = max(size.num_rows for size in sizes)
        columns = self.vocab_size if self.ranks.rank == 0 else 0
        if self.ranks.peer_kernels:
            columns = self.model.lm_head.held.num_rows
        logits = torch.empty(num_rows, columns, dtype=self.placement.dtype, device=self.device)
        redraws = None
        if self._make_redraws and self.ranks.rank == 0 and not self.ranks.peer_kernels:
            redraws = self._make_redraws(self._draw_masked, num_rows, self.vocab_size, self.device)
        return DecodeGraphs(self._decode_and_draw, sizes, logits, redraws)

    def capture_graphs(self, num_running: int) -> int:
        """Capture the decode steps; returns how many sizes there are."""
        self.graphs = self.decode_graphs(num_running)
        self.graphs.capture()
        return len(self.graphs.sizes)

    def drop_graphs(self) -> None:
        """Free the decode graphs and their memory."""
        if self.graphs:
            self.graphs.release()
        self.graphs = None

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self, device_works: bool = True) -> None:
        """Free what it holds; the shard cannot be used afterwards.

        Graphs go first: they hold exchanges with other ranks. `return_memory` comes last, when the
        other ranks have ended.
        """
        if device_works:
            with suppress(RuntimeError):  # a device that has failed is left all the same
                self.synchronize()  # a step may be in flight
        self.drop_graphs()
        while self.at_close:
            self.at_close.pop()()
        if self.adapters is not None:
            self.adapters.close()
        del self.model, self.pools
        self.drafting = DeviceDrafting()
        self._drop_table()
        if self.memory is not None and device_works:
            with suppress(RuntimeError):
                self.memory.close()

    def return_memory(self) -> None:
        """Return freed memory to the device, for other processes to use."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed keeps it
                torch.cuda.empty_cache()


def _for_groups(
    context: Context, slots: Iterable[torch.Tensor], tables: Iterable[torch.Tensor | None]
) -> list[Context]:
    """The first cache group's context, and those of the other groups."""
    others = zip(slots, tables, strict=True)
    return [context, *(replace(context, slot_mapping=s, block_tables=t) for s, t in others)]


def _computed(size: Size, decoding: Decoding, logits: torch.Tensor) -> Computed:
    """What a decode step leaves before its tokens are drawn."""
    choices, queries = (decoding.temperatures, decoding.keys), size.num_queries
    drafted = decoding if queries > 1 else None
    return Computed(logits, decoding.rows, choices, num_queries=queries, decoding=drafted)
