"""Write a trace of a few steps with PyTorch's profiler: the operators and kernels of each step.

It runs the start of a workload on a warm engine: as many prompts as fit into one step, one prefill,
and some decode steps. The profiler slows them down, so their times are not part of the figures.
"""

import itertools
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

DECODE_STEPS = 4
TOP = 10


def steps_of(llm: LLM, prompts: list[list[int]], temperature: float) -> int:
    """Prefill as many prompts as fit into a step and decode; return the number of steps."""
    budget = llm.config.max_num_batched_tokens
    ends = itertools.accumulate(len(prompt) for prompt in prompts)
    fitting = max(1, sum(end <= budget for end in ends))
    params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=1 + DECODE_STEPS)
    for prompt in prompts[: min(fitting, llm.config.max_num_seqs)]:
        llm.add_request(prompt[:budget], params)
    for step in itertools.count(1):
        kind = "prefill" if llm.stats()["num_waiting"] else "decode"
        with record_function(f"step {step}: {kind}"):
            llm.step()
        if llm.is_finished():
            return step
    raise AssertionError


def write_trace(llm: LLM, prompts: list[list[int]], temperature: float, file: Path) -> str:
    """Write a trace for chrome://tracing or Perfetto; return a summary to print.

    A first profile is dropped, because it includes the profiler's own start. Prompts are reversed,
    so that they are not in the prefix cache from the measured runs.
    """
    activities = [ProfilerActivity.CPU]
    on_cuda = torch.device(llm.config.device).type == "cuda"
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities):
        steps_of(llm, [sorted(prompts[0])], temperature)
    with profile(activities=activities) as profiler:
        steps = steps_of(llm, [prompt[::-1] for prompt in prompts], temperature)
    profiler.export_chrome_trace(str(file))
    time_of = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    rows = [row for row in profiler.key_averages() if not row.key.startswith("step ")]
    total = sum(getattr(row, time_of) for row in rows)
    top = sorted(rows, key=lambda row: -getattr(row, time_of))[:TOP]
    lines = [f"trace of {steps} steps: {file} (open it in https://ui.perfetto.dev)"]
    for row in top:
        time = getattr(row, time_of)
        lines.append(f"  {time / 1e3:10.2f} ms {time / total:6.1%} {row.count:6} x {row.key[:70]}")
    return "\n".join(lines)
