"""Warm-up on a GPU: the largest step and the smallest, run once before requests come.

It compiles kernels, connects NCCL and shows how much memory a step takes.
"""

import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine.engine_config import most_running, most_tokens
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.run.device_table import NO_CHANGES, TableChanges
from nanovllm.engine.run.draw_inputs import draw_inputs
from nanovllm.engine.run.logprobs import rows_at_a_time, warm_up_logprobs
from nanovllm.engine.run.narrowing import rows_narrowed_together
from nanovllm.engine.run.prefill_graphs import prefill_graphs
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import MARKS, PrefillInputs, StepInputs
from nanovllm.engine.run.transfer import upload_all
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine.start.forms import form_of
from nanovllm.layers.block import Block
from nanovllm.layers.compiling import compile_in_threads
from nanovllm.layers.filters import Filters
from nanovllm.models.decoder import CausalLM
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")

SHORT = 64  # tokens of a sequence; attention over longer ones may have another kernel


def compile_steps(shard: Shard, config: Config) -> None:
    """Compile Triton's kernels of prefills and of all decode steps, many at the same time.

    Other kernels are compiled when they are first launched: by the warm-up, a capture or a step.
    """
    num_running = most_running(config)
    shard.make_table(num_running, shard.placement.max_positions)
    shard.caches.allocate(1, num_running)

    def steps() -> None:
        _run_largest_step(shard, most_tokens(config), num_running)
        _run_prefills(shard, most_tokens(config))
        graphs = shard.decode_graphs(num_running)
        for size in graphs.sizes:
            if shard.placement.uses_graphs or size.num_seqs == 1:
                graphs.run(size)
        if shard.placement.uses_graphs and (
            prefills := prefill_graphs(shard, num_running, most_tokens(config))
        ):
            for size_of_prefill in prefills.sizes:
                prefills.run(size_of_prefill)

    with _errors_name_options(shard, config), ExitStack() as stack:
        for _, model in shard.models:
            stack.enter_context(_two_layers_of_each_kind(model))
        compile_in_threads(steps, shard.device)
    # With peers, only a launch connects them.
    shard.are_loaded = shard.ranks.size == 1
    shard.caches.release()


def warm_up(shard: Shard, config: Config, num_running: int) -> None:
    """Run the largest step and the smallest one, which may use other kernels."""
    with _errors_name_options(shard, config):
        _run_largest_step(shard, most_tokens(config), num_running)
        torch.cuda.synchronize(shard.device)


def first_steps(shard: Shard, config: Config, num_running: int) -> None:
    """Run the first steps with the shard's table and pool, and capture all graphs."""
    warm_up(shard, config, num_running)  # compiles kernels; fails here, not in a step
    if not shard.placement.uses_graphs:
        shard.decode_graphs(num_running).run(Size(1))  # compiles what decode needs
        return
    # A small pool runs fewer sequences than the dry run had: other sizes may have other kernels.
    shard.are_loaded &= num_running == most_running(config)
    start = time.perf_counter()
    shard.capture_graphs(num_running, most_tokens(config))
    seconds = time.perf_counter() - start
    captured = [graphs.sizes for graphs in (shard.graphs, shard.short_prefills) if graphs]
    logger.info("%d graphs captured in %.1f s", sum(map(len, captured)), seconds)
    shard.drafting.measure(shard)


@contextmanager
def _errors_name_options(shard: Shard, config: Config) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} with"
            f" max_num_seqs={config.max_num_seqs} does not fit on {shard.device} beside weights"
            " and KV pool; lower them, num_kvcache_blocks or gpu_memory_utilization"
        ) from error


@contextmanager
def _two_layers_of_each_kind(model: CausalLM) -> Iterator[None]:
    """A context in which the model has at most two layers of each kind and form.

    Other layers use the same kernels; the first layer may use others than the second one.
    """
    decoder = model.model
    layers, kinds = decoder.layers, dict[Hashable, list[Block]]()
    for layer in layers:
        assert isinstance(layer, Block)
        kinds.setdefault((layer.kind, form_of(layer)), []).append(layer)
    decoder.layers = nn.ModuleList(layer for alike in kinds.values() for layer in alike[:2])
    taps, decoder.taps = decoder.taps, tuple(0 for _ in decoder.taps)
    try:
        yield
    finally:
        decoder.layers, decoder.taps = layers, taps


def _run_prefills(shard: Shard, num_tokens: int) -> None:
    """Run prefills of `num_tokens` in short and long sequences, cached or not; then smaller ones.

    Layers of experts have other kernels for other numbers of tokens.
    """
    most = shard.placement.max_positions
    for longest in (min(SHORT, most), most):
        for cached in (0, 1):
            inputs = warmup_inputs(num_tokens, max(1, longest - cached), cached)
            _prefill(shard, inputs, -(-longest // shard.block_size) * cached)
    for exponent in range(1, (num_tokens - 1).bit_length()):
        _prefill(shard, warmup_inputs(1 << exponent, most))


def _prefill(shard: Shard, prefill: PrefillInputs, width: int = 0) -> torch.Tensor:
    """The hidden states of a prefill. The device's drafting computes it, too.

    If rows may have marks, the prefill is computed with marks first.
    """
    inputs = StepInputs(0, width, NO_CHANGES, prefill)
    for catch_up in shard.drafting.warm_up_steps(inputs):
        shard.catch_up(catch_up)
    num_groups = max(1, len(shard.caches.groups.groups))
    inputs.prefill = replace(prefill, slot_mapping=np.tile(prefill.slot_mapping, num_groups))
    if shard.marking is not None:
        marks = np.zeros(len(prefill.input_ids), np.int32)
        shard.prefills.hidden(replace(inputs, is_marked=True, arrays={MARKS: marks}))
    return shard.prefills.hidden(inputs)


def _run_largest_step(shard: Shard, num_tokens: int, num_running: int) -> None:
    vocab_size, longest = shard.model_config.vocab_size, shard.placement.max_positions
    layout = shard.table.layout
    shard.table.write(TableChanges(np.array([layout.batch]), np.array([layout.unused_row])))
    shard.table.share()  # NCCL connects in the first exchange of a kind
    _prefill(shard, warmup_inputs(1, longest))
    hidden = _prefill(shard, warmup_inputs(num_tokens, longest))
    reported = shard.model.compute_logits(hidden[: rows_at_a_time(vocab_size)])
    if shard.ranks.rank == 0:
        warm_up_logprobs(reported)
    del reported
    most_rows = num_running + shard.drafting.most_in_step
    logits = shard.model.compute_logits(hidden[:most_rows])
    ones = torch.ones(len(logits), device=shard.device)
    sampler = shard.draws.sampler
    sampler(logits, ones, ones.long())
    sampler(logits, None, None)
    if shard.ranks.rank == 0:  # which samples
        equal = torch.zeros_like(logits)
        lists = equal.float()  # as large as the copies that penalties and token lists make
        filters = warmup_filters(len(equal), vocab_size, shard.device.type)
        filters = upload_all(filters, shard.device)
        sampler(equal, ones, ones.long(), filters)
        sampler(equal, None, None, filters[-1:])
        del lists


def warmup_filters(num_rows: int, vocab_size: int, device_type: str) -> list[Filters]:
    """Filters that take the most memory: nearly all tokens are candidates, of the largest copies.

    Penalties need a copy in float32 in place of another copy; filters of all rows need no copy.
    Lists of tokens need more memory in plain PyTorch than in the kernels. The last two filters, of
    a row each, are there to compile their kernels; the very last has only a mask.
    """
    filters: list[Filters] = []
    many = vocab_size - 1
    for number, penalty, top_k in ((num_rows, 1.1, many), (num_rows - 1, 1.0, many), (1, 1.0, -1)):
        params = SamplingParams(top_k=top_k, top_p=0.99, repetition_penalty=penalty)
        size = min(number, rows_narrowed_together(vocab_size, device_type))
        parts = (SequenceParts(counts=TokenCounts()) for _ in range(size))
        seqs = [Sequence([0], params, parts=part) for part in parts]
        filters += draw_inputs(seqs, vocab_size, device_type).filters
    filters.append(Filters(torch.zeros(1, dtype=torch.long)))
    for part in (filters[0], filters[-1]):
        shape = len(part.rows), -(-vocab_size // 32)
        part.masks = torch.full(shape, -1, dtype=torch.int32)
    return filters


def warmup_inputs(num_tokens: int, longest: int, cached: int = 0) -> PrefillInputs:
    """A prefill of `num_tokens` tokens in sequences of up to `longest`, which stores nothing.

    Each sequence has the block table in row 0, and `cached` more tokens in the cache.
    """
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    no_rows = np.zeros(0, np.int64)
    return PrefillInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) % longest,
        slot_mapping=np.full(num_tokens, -1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts + cached * np.arange(len(starts), dtype=np.int32),
        table_rows=np.zeros(len(starts) - 1, np.int64),
        sample_table_rows=no_rows,
        sampled_tokens=no_rows,
    )
