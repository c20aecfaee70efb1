"""Time the runs of a benchmark, and compare them with the roofline."""

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nanovllm import __version__
from nanovllm.bench import roofline, trace
from nanovllm.bench.acceptance import accept_by_chance
from nanovllm.bench.machine import machine_name, measure_machine
from nanovllm.bench.plan import Plan
from nanovllm.bench.workload import Workload
from nanovllm.engine.start.placement import Placement, resolve_placement
from nanovllm.formats.choice import format_of
from nanovllm.kernels.kv_layer import head_bytes
from nanovllm.layers.ranks import Ranks
from nanovllm.llm import LLM
from nanovllm.models import model_size
from nanovllm.models.model_size import WeightBytes
from nanovllm.sampling_params import SamplingParams

SHORT_RUN_SECONDS = 60  # a shorter run is repeated if `repeats` is not given
SLOW_FLOOR_SECONDS = 60  # for a longer floor, smaller options are suggested


def describe(plan: Plan) -> dict[str, Any]:
    """The first part of the result: machine, model, workload and roofline."""
    model, device, num_ranks = plan.model, plan.device, plan.config.tensor_parallel_size
    placement = resolve_placement(plan.config, model, Ranks(0, num_ranks))
    options = dataclasses.asdict(plan.config)
    del options["model"]
    return {
        "version": __version__,
        "machine": machine_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_ranks": num_ranks,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "model": plan.name,
        "num_params": model_size.num_params(model),
        "dtype": str(placement.dtype).removeprefix("torch."),
        "quantization": model.quantization.descriptions if model.quantization else [],
        "kv_dtype": str(placement.kv_dtype).removeprefix("torch."),
        "workload": {
            **dataclasses.asdict(plan.lengths),
            "temperature": plan.lengths.temperature,
            "input_tokens": sum(map(len, plan.workload.prompts)),
            "output_tokens": sum(plan.workload.output_lens),
        },
        "roofline": _roofline(plan, placement),
        "options": options,
    }


def _roofline(plan: Plan, placement: Placement) -> dict[str, Any]:
    """The machine's rates, and the least time of the workload with them."""
    input_lens, output_lens = list(map(len, plan.workload.prompts)), plan.workload.output_lens
    sizes = WeightBytes(placement.dtype.itemsize, plan.model.quantization)
    # The format of most weights decides how fast they are multiplied.
    machine = measure_machine(placement, format_of(model_size.main_scheme(plan.model)))
    floor = roofline.floor(
        plan.model, sizes, input_lens, output_lens, machine,
        lambda head_dim: head_bytes(head_dim, placement.kv_dtype),
    )  # fmt: skip
    return {
        "memory_bytes_per_second": machine.bytes_per_second,
        "matmul_flops_per_second": machine.flops_per_second,
        **dataclasses.asdict(floor),
        "seconds": floor.seconds,
        "output_tokens_per_second": sum(output_lens) / floor.seconds,
    }


def time_run(llm: LLM, workload: Workload, temperature: float) -> float:
    """Seconds to generate the whole workload; every request generates its full length."""
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n)
        for n in workload.output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output["token_ids"]) for output in outputs] == workload.output_lens
    return seconds


def measure(llm: LLM, plan: Plan, repeats: int | None) -> dict[str, Any]:
    """Warm up, run `repeats` times, and return the figures."""
    workload, lengths, vocab_size = plan.workload, plan.lengths, plan.model.vocab_size
    warm_up = Workload([[0] * lengths.min_input_len], [min(16, lengths.min_output_len)])
    time_run(llm, warm_up, lengths.temperature)
    before, preemptions = dataclasses.replace(llm.counter), llm.scheduler.num_preemptions
    seconds: list[float] = []
    while repeats is None or len(seconds) < repeats:
        # Different tokens in each run, so that the prefix cache does not have its prompts.
        prompts = [[(t + len(seconds)) % vocab_size for t in prompt] for prompt in workload.prompts]
        repeat = Workload(prompts, workload.output_lens)
        seconds.append(time_run(llm, repeat, lengths.temperature))
        print(f"  run {len(seconds)}: {seconds[-1]:.2f} s", flush=True)
        if repeats is None:
            repeats = 3 if seconds[0] < SHORT_RUN_SECONDS else 1
    median, counter = statistics.median(seconds), llm.counter
    return {
        "attention_backend": llm.config.attention_backend,
        "seconds": seconds,
        "median_seconds": median,
        "output_tokens_per_second": sum(workload.output_lens) / median,
        "prefill_tokens_per_second": (counter.prefill_tokens - before.prefill_tokens)
        / (counter.prefill_seconds - before.prefill_seconds),
        "decode_tokens_per_second": (counter.decode_tokens - before.decode_tokens)
        / max(
            counter.decode_seconds - before.decode_seconds, 1e-9
        ),  # with one token each: no decode
        "preemptions": llm.scheduler.num_preemptions - preemptions,
        "drafted_tokens": counter.drafted_tokens - before.drafted_tokens,
        "accepted_tokens": counter.accepted_tokens - before.accepted_tokens,
        "tokens_per_step": counter.tokens_per_step(before),
    }


def print_floor(result: dict[str, Any]) -> None:
    """Print the model, the workload and its roofline."""
    load, floor = result["workload"], result["roofline"]
    on_cpu = result["device"] == "cpu"
    ranks = f", {result['num_ranks']} ranks" if result["num_ranks"] > 1 else ""
    chance = load["acceptance"]
    drafts = "" if chance is None else f"; a draft is right with probability {chance:g}"
    types = "; ".join([result["dtype"], *result["quantization"], f"KV in {result['kv_dtype']}"])
    print(
        f"{result['model']}: {result['num_params'] / 1e6:,.0f}M parameters, {types},"
        f" on {result['machine' if on_cpu else 'device']}{ranks}\n"
        f"  workload: {load['num_seqs']} requests, {load['input_tokens']:,} tokens in,"
        f" {load['output_tokens']:,} out{drafts}\n"
        f"  measured: {'read' if on_cpu else 'copy'}"
        f" {floor['memory_bytes_per_second'] / 1e9:,.1f} GB/s,"
        f" matmul {floor['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s\n"
        f"  roofline: {floor['seconds']:.2f} s = {floor['decode_kv_seconds']:.2f} decode KV reads"
        f" + {floor['decode_gemm_seconds']:.2f} decode GEMM"
        f" + {floor['prefill_seconds']:.2f} prefill;"
        f" {floor['output_tokens_per_second']:,.0f} output tok/s"
    )
    if on_cpu and floor["seconds"] > SLOW_FLOOR_SECONDS:
        print(
            f"  a run takes {floor['seconds'] / 60:.0f} minutes or more. For a shorter one:"
            f" --shape qwen3-42m, or --num-seqs {min(16, load['num_seqs'])} --max-input-len 128"
            " --max-output-len 128"
        )
    sys.stdout.flush()


def print_result(result: dict[str, Any]) -> None:
    """Print the figures of the runs as a table."""
    seconds, rate = result["seconds"], "{:,.1f} tok/s".format
    percent = f"{result['roofline_percent']:.1f}% of the roofline"
    if result["roofline_percent"] > 100:
        percent += " (other programs slowed the measured rates, or weights stay in a cache)"
    rows = {
        "output": f"{rate(result['output_tokens_per_second'])}, {percent}",
        "prefill": rate(result["prefill_tokens_per_second"]),
        "decode": rate(result["decode_tokens_per_second"]),
        "time of a run": f"median {result['median_seconds']:.2f} s of {len(seconds)},"
        f" {min(seconds):.2f} to {max(seconds):.2f} s",
        "preemptions": f"{result['preemptions']:,}",
        "attention": result["attention_backend"],
    }
    if drafted := result["drafted_tokens"]:
        rows["drafts"] = (
            f"{result['accepted_tokens']:,} of {drafted:,} were right,"
            f" {result['tokens_per_step']:.2f} tokens a sequence and step"
        )
    elif result["workload"]["acceptance"] is not None or result.get("speculates"):
        rows["drafts"] = "none, as none was worth its cost"
    print("\n".join(f"  {name:<14}{text}" for name, text in rows.items()))


def run_alone(
    plan: Plan, result: dict[str, Any], repeats: int | None, profile: Path | None
) -> None:
    """Measure this engine, print the figures, and write a trace to `profile` if it is given."""
    lengths = plan.lengths
    with LLM(**dataclasses.asdict(plan.config)) as llm:
        if lengths.acceptance is not None:
            accept_by_chance(llm, lengths.acceptance, lengths.seed)
        result |= measure(llm, plan, repeats)
        result["speculates"] = plan.config.speculative_config is not None
        result["roofline_percent"] = 100 * result["roofline"]["seconds"] / result["median_seconds"]
        if plan.device.type == "cuda":  # the KV pool counts too
            result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(plan.device)
        print_result(result)
        if profile:
            print(
                trace.write_trace(llm, plan.workload.prompts, lengths.temperature, profile),
                flush=True,
            )
