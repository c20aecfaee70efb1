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
from nanovllm.engine.cuda_graph import DecodeGraphs, batch_ladder
from nanovllm.engine.device import computing_on, resolve_device, resolve_dtype
from nanovllm.engine.inputs import (
    Array,
    BlockTables,
    StepInputs,
    decode_inputs,
    prefill_inputs,
    upload,
    warmup_inputs,
)
from nanovllm.engine.kv_pool import GIB, KVPool, settle_lengths
from nanovllm.engine.launched import Launched
from nanovllm.engine.logprobs import (
    Telling,
    rows_at_a_time,
    tell_logprobs,
    tell_prompt_logprobs,
    untold_prompt_tokens,
    warm_up_logprobs,
)
from nanovllm.engine.sampling_inputs import plain_choices, sampling_inputs, warmup_filters
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.engine.workers import Workers
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import AttentionSpec, get_backend
from nanovllm.layers.experts import Experts
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.rotary_embedding import max_rope_positions
from nanovllm.layers.sampler import Sampler
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_dummy, load_model
from nanovllm.utils.ranks import ALONE, Ranks

logger = logging.getLogger("nanovllm")

MIB = 1 << 20
MAX_GIB = 1 << 30  # more than any machine has; keeps integers out of the way of infinities
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
        self.max_num_running = config.max_num_running
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
            self.backend = get_backend(config.attention_backend, spec)
        self.block_size = self.backend.block_size
        self.config = dataclasses.replace(
            config,
            device=str(self.device),
            dtype=str(self.dtype),
            kvcache_block_size=self.block_size,
            attention_backend=self.backend.name,
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
        self.block_tables = BlockTables()
        logger.info(
            "%s on %s in %s, %.3f GB loaded in %.1f s; attention: %s, other kernels: %s",
            model_config.architecture, self.device, str(self.dtype).removeprefix("torch."),
            self.weight_bytes / 1e9, time.perf_counter() - start, self.backend.name,
            self.backend.kernels.name,
        )  # fmt: skip

    def start(self) -> None:
        """Meet the other ranks, size the KV pool, compile and capture. All ranks at a time."""
        if self.workers:
            self.workers.connect()
        with self.computing():
            num_blocks = self.config.num_kvcache_blocks or self._fit_kv_blocks()
            self.config = settle_lengths(
                self.config,
                self.pool,
                num_blocks,
                self.max_positions,
                self.model_config.longest_window,
            )
            self.pool.allocate(num_blocks)
            if self.device.type == "cuda":
                self._warm_up()  # what is too large, or must be compiled, shows here
            if self._uses_graphs:
                start = time.perf_counter()
                num_graphs = self._capture_graphs()
                seconds = time.perf_counter() - start
                logger.info("%d decode graphs captured in %.1f s", num_graphs, seconds)
            elif self.device.type == "cuda":
                self.decode_graphs().run(1)  # compiles what decode needs

    def launch(self, batch: Batch, last: Launched | None = None) -> Launched:
        """Begin to compute a step. On a GPU with Triton's kernels it waits for nothing.

        Tokens that are on their way to a decode step come from the step before, `last`.
        """
        if batch.is_prefill:
            inputs = prefill_inputs(batch, self.block_size)
        else:
            inputs = decode_inputs(batch, self.block_size, self.block_tables)
        untold = untold_prompt_tokens(batch.seqs)
        tellings: list[Telling] = []

        def tell(logits: torch.Tensor) -> None:
            tellings.append(tell_prompt_logprobs(untold, logits))

        with self.workers.step(inputs) if self.workers else nullcontext(), self.computing():
            input_ids = last.fill(inputs.input_ids, batch.seqs) if last is not None else None
            choices = plain_choices(batch.seqs) if self._replays(inputs) else None
            logits, token_ids = self.compute(inputs, input_ids, choices, tell)
            token_ids = self._sample(logits, token_ids, batch.sampling_seqs, tellings)
            return Launched(batch, token_ids, tellings)

    def wait(self, launched: Launched) -> list[int]:
        """The tokens of a step, when they are there."""
        with self.workers.waiting() if self.workers else nullcontext():
            launched.synchronize()  # raises if a rank has ended: tokens could be anything then
        return launched.wait()

    def compute(
        self,
        inputs: StepInputs,
        input_ids: torch.Tensor | None = None,
        choices: tuple[Array, Array] | None = None,
        tell: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step's logits [rows that sample, vocab], whole on rank 0 alone. Within `computing`.

        And its tokens, if a decode graph has drawn them by `choices`. `input_ids` are those of
        `inputs` if not given; `tell` takes the logits of the step's `prompt_rows`, a few at a time.
        """
        if self.ranks.size > 1 and PENDING in inputs.input_ids:  # tokens that rank 0 alone has
            if input_ids is None:
                input_ids = upload(inputs.input_ids, self.device)
            input_ids = self.ranks.broadcast(input_ids)
        if self.graphs and self._replays(inputs):
            return self.graphs.replay(inputs, input_ids, choices)
        rows, num_told = inputs.sample_rows, 0
        if rows is not None and inputs.prompt_rows is not None:
            rows, num_told = np.append(inputs.prompt_rows, rows), len(inputs.prompt_rows)
        hidden = self._forward(inputs, input_ids, rows)
        if inputs.copied_blocks is not None:
            for source, target in inputs.copied_blocks.reshape(-1, 2).tolist():
                self.pool.copy(source, target)
        of_prompts, hidden = hidden[:num_told], hidden[num_told:]
        size = rows_at_a_time(self.model_config.vocab_size)
        for start in range(0, num_told, size):
            logits = self.model.compute_logits(of_prompts[start : start + size])
            if tell is not None:
                tell(logits)
        if inputs.shared_rows is not None:
            hidden = hidden[upload(inputs.shared_rows, self.device)]
        return self.model.compute_logits(hidden) if len(hidden) else hidden, None

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
        self._drop_graphs()  # first: they hold exchanges
        del self.model, self.pool
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
            for module in model.modules():
                if isinstance(module, LinearBase):
                    module.pack()
                elif isinstance(module, Attention):
                    module.backend = self.backend
                elif isinstance(module, RMSNorm | SiluAndMul | Experts):
                    module.kernels = self.backend.kernels
                    if isinstance(module, Experts):
                        module.pack()
            if not config.enforce_eager:  # the host takes longer to launch them
                model.model.bind_few_rows(self.backend.kernels)
        return model.eval()

    def _forward(
        self,
        inputs: StepInputs,
        input_ids: torch.Tensor | None = None,
        rows: Array | None = None,
    ) -> torch.Tensor:
        """The hidden states of a step's tokens, or of those `rows` of them alone."""
        if input_ids is None:
            input_ids = upload(inputs.input_ids, self.device)
        context = inputs.context(self.device)
        positions = upload(inputs.positions, self.device)
        needed = None if rows is None else upload(rows, self.device)
        self.backend.plan(context)
        set_context(context)
        try:
            hidden: torch.Tensor = self.model(input_ids, positions, needed)
            return hidden
        finally:
            reset_context()

    def _replays(self, inputs: StepInputs) -> bool:
        is_decode = inputs.context_lens is not None
        size = len(inputs.input_ids)
        return self.graphs is not None and is_decode and size <= self.graphs.max_batch_size

    def _decode(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """What a decode graph holds: the tokens of a step, and in `out` its logits; on rank 0."""
        hidden = self.model(input_ids, positions)
        token_ids = input_ids
        if self.ranks.rank == 0:
            logits = self.model.compute_logits(hidden, out)
            token_ids = self.sampler(logits, temperatures, keys)
        else:
            self.model.compute_logits(hidden)
        return token_ids

    def _sample(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor | None,
        seqs: list[Sequence],
        tellings: list[Telling],
    ) -> torch.Tensor:
        """The tokens of `seqs`; rows that nothing narrows may have theirs in `token_ids`."""
        if not seqs:
            return torch.empty(0, dtype=torch.long, device=self.device)
        if token_ids is None or any(seq.is_narrowed for seq in seqs):
            inputs = sampling_inputs(seqs, self.model_config.vocab_size, self.device)
            token_ids = self.sampler(
                logits, inputs.temperatures, inputs.keys, inputs.filters, token_ids
            )
        tellings += tell_logprobs(seqs, logits, token_ids)
        return token_ids

    def _fit_kv_blocks(self) -> int:
        """How many blocks the memory holds beside everything else: the least of any rank."""
        config = self.config
        if self.device.type == "cpu":
            budget = int(min(config.cpu_kvcache_gib, MAX_GIB) * GIB) // self.ranks.size
            option, hint = f"cpu_kvcache_gib={config.cpu_kvcache_gib}", "raise it"
        else:
            budget = self._free_device_bytes()
            option = f"gpu_memory_utilization={config.gpu_memory_utilization}"
            hint = "raise it, or lower max_num_batched_tokens"
        num_blocks = self.ranks.least(budget // self.pool.block_bytes)
        if num_blocks < 1:
            raise ValueError(
                f"{option} leaves {max(budget, 0) / MIB:.3f} MiB for the KV cache, one block takes"
                f" {self.pool.block_bytes / MIB:.3f} MiB; {hint}"
            )
        return num_blocks

    def _free_device_bytes(self) -> int:
        """Device memory left for KV beside weights, activations, sampler and decode graphs.

        The largest prefill and the largest sampling batch are run, and all graphs captured on a
        stand-in cache, so that what is subtracted was seen and not guessed.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        self._warm_up()
        activations = torch.cuda.max_memory_allocated(self.device) - resident
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        graphs = self._graph_bytes() if self._uses_graphs else 0
        others = total - free
        budget = total * self.config.gpu_memory_utilization - others - activations - graphs
        return int(budget / (1 + self.backend.copied_layers / self.model_config.num_hidden_layers))

    def _warm_up(self) -> None:
        """Run the largest step, and the smallest: their kernels may be others."""
        config, vocab_size = self.config, self.model_config.vocab_size
        sizes = (1, config.max_num_batched_tokens)
        short, long = (warmup_inputs(n, self.max_positions) for n in sizes)
        try:
            self.ranks.broadcast(upload(short.input_ids, self.device))  # NCCL connects in the first
            self._forward(short)  # exchange of a kind
            hidden = self._forward(long)
            told = self.model.compute_logits(hidden[: rows_at_a_time(vocab_size)])
            if self.ranks.rank == 0:
                warm_up_logprobs(told)
            del told
            hidden = hidden[: config.max_num_running]
            logits = self.model.compute_logits(hidden)
            ones = torch.ones(len(hidden), device=self.device)
            self.sampler(logits, ones, ones.long())
            self.sampler(logits, None, None)
            if self.ranks.rank == 0:  # where sampling is done
                alike = torch.zeros_like(logits)
                lists = alike.float()  # what penalties and lists of tokens may take
                filters = warmup_filters(len(alike), vocab_size, self.device)
                self.sampler(alike, ones, ones.long(), filters)
                del lists
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"a step of max_num_batched_tokens={config.max_num_batched_tokens} with"
                f" max_num_seqs={config.max_num_seqs} does not fit on {self.device} beside weights"
                " and KV pool; lower them, num_kvcache_blocks or gpu_memory_utilization"
            ) from error

    def _graph_bytes(self) -> int:
        """Capture the decode graphs on a stand-in cache, see what they take, and drop them."""
        self.pool.allocate(num_blocks=1)
        before, _ = torch.cuda.mem_get_info(self.device)
        self._capture_graphs()
        after, _ = torch.cuda.mem_get_info(self.device)
        self._drop_graphs()
        self.pool.release()
        torch.cuda.empty_cache()
        return before - after

    @property
    def _uses_graphs(self) -> bool:
        eager = self.config.enforce_eager or not self.backend.graph_safe
        return self.device.type == "cuda" and not eager

    def _capture_graphs(self) -> int:
        self.graphs = self.decode_graphs()
        self.graphs.capture()
        return len(self.graphs.sizes)

    def _drop_graphs(self) -> None:
        if self.graphs:
            self.graphs.release()
        self.graphs = None

    def decode_graphs(self) -> DecodeGraphs:
        """The static-buffer decode path, not captured: it runs on any device."""
        top = min(self.max_num_running, MAX_GRAPH_BATCH)
        vocab_size = self.model_config.vocab_size if self.ranks.rank == 0 else 0
        return DecodeGraphs(
            step=self._decode,
            plan=self.backend.plan,
            sizes=batch_ladder(top),
            max_blocks=-(-self.max_positions // self.block_size),
            logits=torch.empty(top, vocab_size, dtype=self.dtype, device=self.device),
        )
