"""The cost of filters: the sampler with each filter, against the sampler without.

    python benchmarks/sampler.py [--rows 16] [--vocab 151936] [--device cpu]

All rows of the batch have the same filter. Logits are bf16 and normal: flat, where most of the
tokens have 90% of the mass, and peaked, where a thousand have it. Filters take turns, so that other
load on the machine affects all of them alike. Reported are medians, and their ratios to no filter.
The host's work before is not included: parameters as tensors, and on a GPU the launches.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

from nanovllm import SamplingParams
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.run.draw_inputs import draw_inputs
from nanovllm.engine.run.transfer import upload, upload_all
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.layers.sampler import Sampler

NONE = "none"
FILTERS: dict[str, dict[str, Any]] = {
    NONE: {},
    "min_p=0.05": dict(min_p=0.05),
    "top_k=50": dict(top_k=50),
    "top_k=1000": dict(top_k=1000),
    "top_k=5000": dict(top_k=5000),
    "top_p=0.9": dict(top_p=0.9),
    "top_p=0.5": dict(top_p=0.5),
    "top_p=0.1": dict(top_p=0.1),
    "min_p=0.05 top_p=0.9": dict(min_p=0.05, top_p=0.9),
    "top_k=50 top_p=0.9": dict(top_k=50, top_p=0.9),
    "top_k=5000 top_p=0.9": dict(top_k=5000, top_p=0.9),
    "all three": dict(min_p=0.05, top_k=50, top_p=0.9),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.5),
    "penalties top_p=0.9": dict(repetition_penalty=1.1, top_p=0.9),
    "100 allowed": dict(allowed_token_ids=list(range(100, 200))),
    "2 allowed top_k=20 top_p=0.9": dict(allowed_token_ids=[9, 99], top_k=20, top_p=0.9),
    "10 biases": dict(logit_bias=dict.fromkeys(range(10), 1.0)),
}
LAUNCH_CYCLES = 10_000_000  # some milliseconds
SPREADS = {"flat": 1.0, "peaked": 4.0}  # of the logits


def seconds(sampler: Sampler, inputs: tuple[Any, ...], device: torch.device) -> float:
    """The time that one call takes the device; a GPU is kept busy until everything is launched."""
    if device.type == "cpu":
        start = time.perf_counter()
        sampler(*inputs)
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LAUNCH_CYCLES)
    before.record()
    sampler(*inputs)
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def measure(
    sampler: Sampler, logits: torch.Tensor, temperature: float, rounds: int
) -> dict[str, float]:
    """Milliseconds with each filter, medians; each round has other seeds."""
    times: dict[str, list[float]] = {name: [] for name in FILTERS}
    for index in range(-2, rounds):
        for name, fields in FILTERS.items():
            seqs = [
                Sequence(
                    list(range(500)),
                    SamplingParams(seed=row, temperature=temperature, **fields),
                    parts=SequenceParts(counts=TokenCounts()),
                )
                for row in range(len(logits))
            ]
            for seq in seqs:
                seq.token_ids += [7] * (index + 2)
            made = draw_inputs(seqs, logits.shape[1], logits.device.type)
            assert made.temperatures is not None and made.keys is not None
            choices = upload(made.temperatures, logits.device), upload(made.keys, logits.device)
            inputs = logits, *choices, upload_all(made.filters, logits.device)
            taken = seconds(sampler, inputs, logits.device)
            if index >= 0:  # the first ones warm up
                times[name].append(1e3 * taken)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a line for each filter, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=16, metavar="N")
    parser.add_argument("--vocab", type=int, default=151_936, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--rounds", type=int, default=31, metavar="N")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=auto, choices=("cuda", "cpu"))
    args = parser.parse_args()
    sampler = Sampler()
    if args.device == "cuda":
        from nanovllm.kernels.triton.table import triton_kernels

        sampler.kernels = triton_kernels()
    torch.manual_seed(0)
    noise = torch.randn(args.rows, args.vocab)
    results = {}
    for name, spread in SPREADS.items():
        logits = (noise * spread).to(args.device, torch.bfloat16)
        results[name] = measure(sampler, logits, args.temperature, args.rounds)
    print(f"{args.rows} rows of {args.vocab} logits on {args.device}, milliseconds and ratios")
    print(f"{'':22}" + "".join(f"{name:>17}" for name in SPREADS))
    for name in FILTERS:
        cells = ((times[name], times[name] / times[NONE]) for times in results.values())
        print(f"{name:22}" + "".join(f"{ms:10.2f} {ratio:5.2f}x" for ms, ratio in cells))
    print(json.dumps({**vars(args), "milliseconds": results}))


if __name__ == "__main__":
    main()
