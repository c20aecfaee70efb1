"""ModelRunner: one rank. It turns a scheduled batch into sampled token ids.

It decides nothing about who runs, and knows no text. Rank 0's drives the other ranks' processes.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.cuda_graph import Computed, DecodeGraphs, batch_ladder
from nanovllm.engine.device import computing_on, resolve_device, resolve_dtype
from nanovllm.engine.kv_pool import KVPool, settle_lengths
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.startup import fit_kv_blocks, warm_up
from nanovllm.engine.step.device_table import Account, Layout, Rows
from nanovllm.engine.step.draw_inputs import sampling_inputs
from nanovllm.engine.step.inputs import (
    PrefillInputs,
    StepInputs,
    decode_inputs,
    prefill_inputs,
)
from nanovllm.engine.step.launched import Launched
from nanovllm.engine.step.logprobs import (
    Telling,
    rows_at_a_time,
    tell_logprobs,
    tell_prompt_logprobs,
    untold_prompt_tokens,
)
from nanovllm.engine.step.transfer import Array, upload, upload_ahead
from nanovllm.engine.workers import Workers
from nanovllm.kernels.plain.read_table import Decoding
from nanovllm.layers.attention.base import AttentionSpec
from nanovllm.layers.attention.layer import Attention
from nanovllm.layers.backend import choose_backend
from nanovllm.layers.context import Context, reset_context, set_context
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rotary_embedding import max_rope_positions
from nanovllm.layers.sampler import Sampler
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_dummy, load_model

logger = logging.getLogger("nanovllm")

MAX_GRAPH_BATCH = 512  # above it a step is long enough to launch its kernels one by one


class ModelRunner:
    """A rank's part of the model, its KV pool and its decode graphs, on one device.

    Made, it has loaded; after `start` it can run, and `config` is the engine's Config with
    everything settled that only the model and the machine can tell: device, dtype, backend, block
    size, number of blocks, max_model_len. `workers` are the other ranks, in rank 0's alone.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        path: Path,
        ranks: Ranks = ALONE,
        workers: Workers | None = None,
    ) -> None:
        start = time.perf_counter()
        self.ranks = ranks
        self.workers = workers
        self.device = resolve_device(config.device, ranks)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.model_config = model_config
        longest = max_rope_positions(
            model_config.rope_parameters, model_config.max_position_embeddings
        )
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ValueError(f"max_model_len={config.max_model_len}, the model's own is {longest}")
        self.max_positions = config.max_model_len or longest
        spec = AttentionSpec(
            self.device, self.dtype, model_config.num_attention_heads // ranks.size,
            max(1, model_config.num_key_value_heads // ranks.size), model_config.head_dim,
            config.kvcache_block_size, not config.enforce_eager,
        )  # fmt: skip
        with self.computing():
            self.backend = choose_backend(config.attention_backend, spec)
        self.block_size = self.backend.attention.block_size
        self.config = dataclasses.replace(
            config,
            device=str(self.device),
            dtype=str(self.dtype),
            kvcache_block_size=self.block_size,
            attention_backend=self.backend.attention.name,
            overlap=self.device.type == "cuda" if config.overlap is None else config.overlap,
        )
        if workers:
            workers.start(self.config, model_config, path)
        self.model = self._build(config, path)
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        self.pool = KVPool(layers, self.block_size, model_config.head_dim, self.dtype, self.device)
        self.sampler = Sampler()
        self.sampler.kernels = self.backend.kernels
        self.graphs: DecodeGraphs | None = None
        logger.info(
            "%s on %s in %s, %.3f GB loaded in %.1f s; attention: %s, other kernels: %s",
            model_config.architecture, self.device, str(self.dtype).removeprefix("torch."),
            self.weight_bytes / 1e9, time.perf_counter() - start, self.backend.attention.name,
            self.backend.kernels.name,
        )  # fmt: skip

    def start(self) -> None:
        """Meet the other ranks, size the KV pool, compile and capture. All ranks at a time."""
        if self.workers:
            self.workers.connect()
        with self.computing():
            num_blocks = self.config.num_kvcache_blocks or fit_kv_blocks(self)
            self.config = settle_lengths(
                self.config,
                self.pool,
                num_blocks,
                self.max_positions,
                self.model_config.longest_window,
            )
            self.make_rows()
            self.pool.allocate(num_blocks)
            if self.device.type == "cuda":
                warm_up(self)  # what is too large, or must be compiled, shows here
            if self.uses_graphs:
                start = time.perf_counter()
                num_graphs = self.capture_graphs()
                seconds = time.perf_counter() - start
                logger.info("%d decode graphs captured in %.1f s", num_graphs, seconds)
            elif self.device.type == "cuda":
                self.decode_graphs().run(1)  # compiles what decode needs

    def launch(self, batch: Batch) -> Launched:
        """Begin to compute a step. On a GPU with Triton's kernels it waits for nothing.

        Tokens that are on their way to it are where the step before has left them.
        """
        if batch.is_prefill:
            inputs = prefill_inputs(batch, self.block_size, self.account)
        else:
            inputs = decode_inputs(batch, self.account)
        untold = untold_prompt_tokens(batch.seqs)
        tellings: list[Telling] = []

        def tell(logits: torch.Tensor) -> None:
            tellings.append(tell_prompt_logprobs(untold, logits))

        with self.workers.step(inputs) if self.workers else nullcontext(), self.computing():
            token_ids = self._sample(self.compute(inputs, tell), batch.sampling_seqs, tellings)
            return Launched(batch, token_ids, tellings)

    def forget(self) -> None:
        """All sequences start over: what the rows hold counts no more."""
        self.account.forget()

    def wait(self, launched: Launched) -> list[int]:
        """The tokens of a step, when they are there."""
        with self.workers.waiting() if self.workers else nullcontext():
            launched.synchronize()  # raises if a rank has ended: tokens could be anything then
        return launched.wait()

    def compute(
        self, inputs: StepInputs, tell: Callable[[torch.Tensor], None] | None = None
    ) -> Computed:
        """Compute a step; within `computing`.

        `tell` takes the logits of a prefill's `prompt_rows`, a few at a time.
        """
        self.rows.write(inputs.places, inputs.words)
        if inputs.prefill is not None:
            logits = self._prefill(inputs.prefill, inputs.width, tell)
            return Computed(logits, upload(inputs.prefill.token_rows, self.device))
        self.share_tokens()
        if self.graphs and inputs.num_seqs <= self.graphs.max_batch_size:
            return self.graphs.replay(inputs.num_seqs)
        hidden, decoding = self._decode(inputs.num_seqs, inputs.width)
        choices = decoding.temperatures, decoding.keys
        return Computed(self.model.compute_logits(hidden), decoding.rows, choices)

    @property
    def failure(self) -> str | None:
        """Why this runner cannot go on, if a rank has ended."""
        return self.workers.failure if self.workers else None

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        if self.workers:
            self.workers.check()

    def close(self) -> None:
        """Give back the device's memory and end the other ranks; the runner is of no more use."""
        if self.device.type == "cuda" and self.failure is None:
            with suppress(RuntimeError):  # a device that has failed is left all the same
                torch.cuda.synchronize(self.device)  # a step may be on its way
        self.drop_graphs()  # first: they hold exchanges
        del self.model, self.pool
        self._drop_rows()
        if self.workers:
            self.workers.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def computing(self) -> AbstractContextManager[None]:
        """What holds while this rank computes."""
        return computing_on(self.device, self.workers.num_threads if self.workers else None)

    def _build(self, config: Config, path: Path) -> CausalLM:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device, torch.inference_mode(False):
                model = CausalLM(
                    self.model_config, self.max_positions, self.ranks, config.enable_expert_parallel
                )
        finally:
            torch.set_default_dtype(previous)
        with torch.no_grad():
            if config.load_format == "dummy":
                with torch.device("meta"):
                    whole = CausalLM(self.model_config, self.max_positions)
                load_dummy(model, whole, config.seed)
            else:
                load_model(model, path, use_tqdm=self.ranks.rank == 0)
            self.weight_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
            # Without graphs the host takes longer to launch few_rows than the device saves.
            model.bind(self.backend, few_rows=not config.enforce_eager)
        return model.eval()

    def make_rows(self) -> None:
        """Room for all that can run, and rank 0's account of it."""
        self._drop_rows()
        longest = self.config.max_model_len or self.max_positions
        layout = Layout(self.config.max_num_running, -(-longest // self.block_size))
        self.rows = Rows(layout, self.device)
        self.account = Account(layout)

    def _drop_rows(self) -> None:
        if hasattr(self, "rows"):
            del self.rows, self.account

    def _prefill(
        self, prefill: PrefillInputs, width: int, tell: Callable[[torch.Tensor], None] | None
    ) -> torch.Tensor:
        """The logits that a prefill's tokens are sampled from."""
        rows, num_told = prefill.sample_rows, 0
        if rows is not None and prefill.prompt_rows is not None:
            rows, num_told = np.append(prefill.prompt_rows, rows), len(prefill.prompt_rows)
        hidden = self.prefill_hidden(prefill, width, rows)
        if prefill.copied_blocks is not None:
            for source, target in prefill.copied_blocks.reshape(-1, 2).tolist():
                self.pool.copy(source, target)
        of_prompts, hidden = hidden[:num_told], hidden[num_told:]
        size = rows_at_a_time(self.model_config.vocab_size)
        for start in range(0, num_told, size):
            logits = self.model.compute_logits(of_prompts[start : start + size])
            if tell is not None:
                tell(logits)
        if prefill.shared_rows is not None:
            hidden = hidden[upload(prefill.shared_rows, self.device)]
        return self.model.compute_logits(hidden) if len(hidden) else hidden

    def prefill_hidden(
        self, prefill: PrefillInputs, width: int = 0, needed: Array | None = None
    ) -> torch.Tensor:
        """The hidden states of a prefill's tokens, or of those `needed` of them alone.

        It reads block tables of `width` columns, or none if that is 0.
        """
        input_ids, positions, slots, q_ends, k_ends = upload_ahead(
            self.device, prefill.input_ids, prefill.positions, prefill.slot_mapping,
            prefill.cu_seqlens_q, prefill.cu_seqlens_k,
        )  # fmt: skip
        pending = prefill.pending()
        if len(pending[0]):
            self.share_tokens()
            input_ids = self.rows.fill(input_ids, *upload_ahead(self.device, *pending))
        tables = rows = None
        if width:
            (table_rows,) = upload_ahead(self.device, prefill.rows)
            tables = self.rows.block_tables(table_rows, width)
        if needed is not None:
            (rows,) = upload_ahead(self.device, needed)
        context = Context(
            is_prefill=True,
            slot_mapping=slots,
            cu_seqlens_q=q_ends,
            cu_seqlens_k=k_ends,
            max_seqlen_q=int(np.diff(prefill.cu_seqlens_q).max()),
            max_seqlen_k=int(np.diff(prefill.cu_seqlens_k).max()),
            block_tables=tables,
        )
        return self._forward(input_ids, positions, context, rows)

    def _decode(self, num_rows: int, width: int) -> tuple[torch.Tensor, Decoding]:
        """The hidden states of the batch that stands in the rows, and what it was."""
        read_table = self.backend.kernels.read_table
        decoding = read_table(self.rows.state, num_rows, width, self.block_size)
        context = Context(
            is_prefill=False,
            slot_mapping=decoding.slot_mapping,
            context_lens=decoding.context_lens,
            block_tables=decoding.block_tables,
        )
        return self._forward(decoding.input_ids, decoding.positions, context), decoding

    def _decode_and_draw(self, num_rows: int, out: torch.Tensor) -> Computed:
        """What a decode graph holds: a step, its logits in `out`, and on rank 0 its tokens."""
        hidden, decoding = self._decode(num_rows, self.rows.layout.max_blocks)
        rows, choices = decoding.rows, (decoding.temperatures, decoding.keys)
        if self.ranks.rank > 0:
            self.model.compute_logits(hidden)
            return Computed(out, rows)
        logits = self.model.compute_logits(hidden, out)
        token_ids = self.sampler(logits, *choices)
        self.rows.keep(rows, token_ids)
        return Computed(logits, rows, choices, token_ids)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The hidden states of these tokens, or of those `rows` of them alone."""
        self.backend.attention.plan(context)
        set_context(context)
        try:
            hidden: torch.Tensor = self.model(input_ids, positions, rows)
            return hidden
        finally:
            reset_context()

    def share_tokens(self) -> None:
        """Tell the other ranks the last tokens, which rank 0 alone has drawn."""
        if self.ranks.size > 1:
            self.ranks.broadcast(self.rows.state.tokens)

    def _sample(
        self, computed: Computed, seqs: list[Sequence], tellings: list[Telling]
    ) -> torch.Tensor:
        """The tokens of `seqs`; of those that nothing narrows they may have been drawn."""
        if not seqs:
            return torch.empty(0, dtype=torch.long, device=self.device)
        logits, rows, choices, token_ids = computed.first(len(seqs))
        if token_ids is None or any(seq.is_narrowed for seq in seqs):
            inputs = sampling_inputs(seqs, self.model_config.vocab_size, self.device, choices)
            token_ids = self.sampler(
                logits, inputs.temperatures, inputs.keys, inputs.filters, token_ids
            )
            self.rows.keep(rows, token_ids)
        tellings += tell_logprobs(seqs, logits, token_ids)
        return token_ids

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        eager = self.config.enforce_eager or not self.backend.graph_safe
        return self.device.type == "cuda" and not eager

    def capture_graphs(self) -> int:
        """Capture the decode steps; returns how many sizes there are."""
        self.graphs = self.decode_graphs()
        self.graphs.capture()
        return len(self.graphs.sizes)

    def drop_graphs(self) -> None:
        """Give up the decode graphs and their memory."""
        if self.graphs:
            self.graphs.release()
        self.graphs = None

    def decode_graphs(self) -> DecodeGraphs:
        """The decode steps of a ladder, not captured: they run on any device."""
        top = min(self.config.max_num_running, MAX_GRAPH_BATCH)
        vocab_size = self.model_config.vocab_size if self.ranks.rank == 0 else 0
        return DecodeGraphs(
            self._decode_and_draw,
            batch_ladder(top),
            torch.empty(top, vocab_size, dtype=self.dtype, device=self.device),
        )
