"""Sizing: how many KV blocks fit in memory beside everything else that the largest step takes."""

import torch

from nanovllm.config import Config
from nanovllm.engine.engine_config import most_running
from nanovllm.engine.kv_pool import GIB
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shard import Shard
from nanovllm.engine.step.draw_inputs import draw_inputs
from nanovllm.engine.step.inputs import warmup_inputs
from nanovllm.engine.step.logprobs import rows_at_a_time, warm_up_logprobs
from nanovllm.engine.step.transfer import upload_all
from nanovllm.layers.filters import Filters
from nanovllm.sampling_params import SamplingParams

MIB = 1 << 20
MAX_GIB = 1 << 30  # more than any machine has: an infinite option becomes a finite integer


def fit_kv_blocks(shard: Shard, config: Config) -> int:
    """How many blocks fit in memory beside everything else: the least of any rank."""
    if shard.device.type == "cpu":
        budget = int(min(config.cpu_kvcache_gib, MAX_GIB) * GIB) // shard.ranks.size
        option, hint = f"cpu_kvcache_gib={config.cpu_kvcache_gib}", "raise it"
    else:
        budget = _free_device_bytes(shard, config)
        option = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        hint = "raise it, or lower max_num_batched_tokens"
    num_blocks = shard.ranks.minimum(budget // shard.pool.block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"{option} leaves {max(budget, 0) / MIB:.3f} MiB for the KV cache, one block takes"
            f" {shard.pool.block_bytes / MIB:.3f} MiB; {hint}"
        )
    return num_blocks


def _free_device_bytes(shard: Shard, config: Config) -> int:
    """Device memory left for KV beside weights, activations, sampler and decode graphs.

    The largest prefill and the largest sampling batch are run, and all graphs are captured on a
    placeholder cache, so that every amount that is subtracted was measured.
    """
    num_running = most_running(config)
    shard.make_table(num_running, shard.placement.max_positions)
    torch.cuda.reset_peak_memory_stats(shard.device)
    resident = torch.cuda.memory_allocated(shard.device)
    warm_up(shard, config, num_running)
    activations = torch.cuda.max_memory_allocated(shard.device) - resident
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(shard.device)
    graphs = _graph_bytes(shard, num_running) if shard.placement.uses_graphs else 0
    others = total - free
    budget = total * config.gpu_memory_utilization - others - activations - graphs
    copied = shard.backend.attention.copied_layers / shard.model_config.num_hidden_layers
    return int(budget / (1 + copied))


def warm_up(shard: Shard, config: Config, num_running: int) -> None:
    """Run the largest step, and the smallest, which may use other kernels."""
    try:
        _run_largest_step(shard, config.max_num_batched_tokens, num_running)
        torch.cuda.synchronize(shard.device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} with"
            f" max_num_seqs={config.max_num_seqs} does not fit on {shard.device} beside weights"
            " and KV pool; lower them, num_kvcache_blocks or gpu_memory_utilization"
        ) from error


def _run_largest_step(shard: Shard, num_tokens: int, num_running: int) -> None:
    vocab_size, longest = shard.model_config.vocab_size, shard.placement.max_positions
    shard.share_tokens()  # NCCL connects in the first exchange of a kind
    shard.prefill_hidden(warmup_inputs(1, longest))
    hidden = shard.prefill_hidden(warmup_inputs(num_tokens, longest))
    reported = shard.model.compute_logits(hidden[: rows_at_a_time(vocab_size)])
    if shard.ranks.rank == 0:
        warm_up_logprobs(reported)
    del reported
    logits = shard.model.compute_logits(hidden[:num_running])
    ones = torch.ones(len(logits), device=shard.device)
    shard.sampler(logits, ones, ones.long())
    shard.sampler(logits, None, None)
    if shard.ranks.rank == 0:  # where sampling is done
        equal = torch.zeros_like(logits)
        lists = equal.float()  # stands for what penalties and lists of tokens may take
        filters = warmup_filters(len(equal), vocab_size, shard.device.type)
        shard.sampler(equal, ones, ones.long(), upload_all(filters, shard.device))
        del lists


def warmup_filters(num_rows: int, vocab_size: int, device_type: str) -> list[Filters]:
    """Filters that take the most memory: nearly all tokens are candidates, of the largest copies.

    Penalties need a copy in float32 in place of another copy; filters of all rows need no copy.
    Lists of tokens add to that where plain PyTorch runs, which takes more than the kernels do. The
    last row is there to compile its kernel.
    """
    filters: list[Filters] = []
    many = vocab_size - 1
    for number, penalty, top_k in ((num_rows, 1.1, many), (num_rows - 1, 1.0, many), (1, 1.0, -1)):
        params = SamplingParams(top_k=top_k, top_p=0.99, repetition_penalty=penalty)
        seqs = [Sequence([0], params, counts=TokenCounts()) for _ in range(number)]
        filters += draw_inputs(seqs, vocab_size, device_type).filters[:1]
    return filters


def _graph_bytes(shard: Shard, num_running: int) -> int:
    """The memory of the decode graphs: capture them on a placeholder cache, then drop them."""
    shard.pool.allocate(num_blocks=1)
    before, _ = torch.cuda.mem_get_info(shard.device)
    shard.capture_graphs(num_running)
    after, _ = torch.cuda.mem_get_info(shard.device)
    shard.drop_graphs()
    shard.pool.release()
    torch.cuda.empty_cache()
    return before - after
