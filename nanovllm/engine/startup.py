"""How large a KV pool the memory holds, beside all else that the largest step takes."""

from typing import TYPE_CHECKING

import torch

from nanovllm.engine.kv_pool import GIB
from nanovllm.engine.step.draw_inputs import warmup_filters
from nanovllm.engine.step.inputs import warmup_inputs
from nanovllm.engine.step.logprobs import rows_at_a_time, warm_up_logprobs

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

MIB = 1 << 20
MAX_GIB = 1 << 30  # more than any machine has; keeps integers out of the way of infinities


def fit_kv_blocks(runner: "ModelRunner") -> int:
    """How many blocks the memory holds beside everything else: the least of any rank."""
    config = runner.config
    if runner.device.type == "cpu":
        budget = int(min(config.cpu_kvcache_gib, MAX_GIB) * GIB) // runner.ranks.size
        option, hint = f"cpu_kvcache_gib={config.cpu_kvcache_gib}", "raise it"
    else:
        budget = _free_device_bytes(runner)
        option = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        hint = "raise it, or lower max_num_batched_tokens"
    num_blocks = runner.ranks.least(budget // runner.pool.block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"{option} leaves {max(budget, 0) / MIB:.3f} MiB for the KV cache, one block takes"
            f" {runner.pool.block_bytes / MIB:.3f} MiB; {hint}"
        )
    return num_blocks


def _free_device_bytes(runner: "ModelRunner") -> int:
    """Device memory left for KV beside weights, activations, sampler and decode graphs.

    The largest prefill and the largest sampling batch are run, and all graphs captured on a
    stand-in cache, so that what is subtracted was seen and not guessed.
    """
    runner.make_rows()  # as many as can run with the largest pool
    torch.cuda.reset_peak_memory_stats(runner.device)
    resident = torch.cuda.memory_allocated(runner.device)
    warm_up(runner)
    activations = torch.cuda.max_memory_allocated(runner.device) - resident
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    graphs = _graph_bytes(runner) if runner.uses_graphs else 0
    others = total - free
    budget = total * runner.config.gpu_memory_utilization - others - activations - graphs
    copied = runner.backend.attention.copied_layers
    return int(budget / (1 + copied / runner.model_config.num_hidden_layers))


def warm_up(runner: "ModelRunner") -> None:
    """Run the largest step, and the smallest: their kernels may be others."""
    config, vocab_size = runner.config, runner.model_config.vocab_size
    sizes = (1, config.max_num_batched_tokens)
    short, long = (warmup_inputs(n, runner.max_positions) for n in sizes)
    try:
        runner.share_tokens()  # NCCL connects in the first exchange of a kind
        runner.prefill_hidden(short)
        hidden = runner.prefill_hidden(long)
        told = runner.model.compute_logits(hidden[: rows_at_a_time(vocab_size)])
        if runner.ranks.rank == 0:
            warm_up_logprobs(told)
        del told
        hidden = hidden[: config.max_num_running]
        logits = runner.model.compute_logits(hidden)
        ones = torch.ones(len(hidden), device=runner.device)
        runner.sampler(logits, ones, ones.long())
        runner.sampler(logits, None, None)
        if runner.ranks.rank == 0:  # where sampling is done
            alike = torch.zeros_like(logits)
            lists = alike.float()  # what penalties and lists of tokens may take
            filters = warmup_filters(len(alike), vocab_size, runner.device)
            runner.sampler(alike, ones, ones.long(), filters)
            del lists
        torch.cuda.synchronize(runner.device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} with"
            f" max_num_seqs={config.max_num_seqs} does not fit on {runner.device} beside weights"
            " and KV pool; lower them, num_kvcache_blocks or gpu_memory_utilization"
        ) from error


def _graph_bytes(runner: "ModelRunner") -> int:
    """Capture the decode graphs on a stand-in cache, see what they take, and drop them."""
    runner.pool.allocate(num_blocks=1)
    before, _ = torch.cuda.mem_get_info(runner.device)
    runner.capture_graphs()
    after, _ = torch.cuda.mem_get_info(runner.device)
    runner.drop_graphs()
    runner.pool.release()
    torch.cuda.empty_cache()
    return before - after
