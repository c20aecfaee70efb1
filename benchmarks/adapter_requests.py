"""Compare the speed of requests with adapters and of the same requests without.

    python benchmarks/adapter_requests.py [--shape qwen3-8b] [--rank 16] [--rounds 5]
                                          [--loads 256x8,256x1,32x8,1x1]

A load is a number of requests and the number of adapters that they use in turn; all linear layers
have adapters, with random weights. One engine computes the same random prompts with and without
adapters, in turns. A line of JSON for each load has the medians in tokens per second, and the
median and the extremes of the turns' ratios.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.bench.shapes import SHAPES, write_shape


def write_adapter(shape: str, rank: int, path: Path, seed: int) -> LoRARequest:
    """Write an adapter of all linear layers, as PEFT saves it."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, _, _ = SHAPES[shape]
    sizes = {  # inputs and outputs
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv_heads * head_dim),
        "self_attn.v_proj": (hidden, kv_heads * head_dim),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (size_in, size_out) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a, b = torch.randn(rank, size_in), torch.randn(size_out, rank)
            tensors[f"{prefix}.lora_A.weight"] = (a * size_in**-0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (b * rank**-0.5).bfloat16()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in sizes]
    config = dict(peft_type="LORA", r=rank, lora_alpha=rank, target_modules=modules)
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return LoRARequest(path.name, str(path))


def measure(
    llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest], output_len: int, rounds: int
) -> dict[str, Any]:
    """Compute the prompts in turns, with these adapters and without."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    number = len(prompts)
    cases: dict[str, Any] = {
        "without": None,
        "with": [adapters[i % len(adapters)] for i in range(number)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name in sorted(cases, reverse=turn % 2 == 0):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False, lora_request=cases[name])
            seconds[name].append(time.perf_counter() - start)
    turns = list(zip(*(taken[1:] for taken in seconds.values()), strict=True))  # the first warms up
    shares = sorted(without / adapted for without, adapted in turns)
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    speeds = {name: round(number * output_len / m) for name, m in zip(cases, medians, strict=True)}
    share = {"share": round(statistics.median(shares), 3)}
    extremes = [round(shares[0], 3), round(shares[-1], 3)]
    return {"requests": number, "adapters": len(adapters), **speeds, **share, "extremes": extremes}


def parse_loads(text: str) -> list[tuple[int, int]]:
    """Pairs of requests and adapters: "256x8,1x1"."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(requests), int(adapters)) for requests, adapters in pairs]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    dense = [name for name in SHAPES if name.startswith("qwen3-") and not name.endswith("a3b")]
    parser.add_argument("--shape", default="qwen3-8b", choices=dense)
    parser.add_argument("--rank", type=int, default=16, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    loads = "256x8,256x1,32x8,1x1"
    parser.add_argument("--loads", type=parse_loads, default=loads, metavar="RxA,...")
    parser.add_argument("--input-len", type=int, default=128, metavar="N")
    parser.add_argument("--output-len", type=int, default=128, metavar="N")
    args = parser.parse_args()
    rng = random.Random(0)
    number, most = (max(column) for column in zip(*args.loads, strict=True))
    vocab_size = SHAPES[args.shape][6]
    prompts = [rng.choices(range(vocab_size), k=args.input_len) for _ in range(number)]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        adapters = [
            write_adapter(args.shape, args.rank, folder / f"adapter-{i}", i) for i in range(most)
        ]
        options = dict(
            load_format="dummy", enable_lora=True, max_loras=most,
            max_model_len=args.input_len + args.output_len, enable_prefix_caching=False,
        )  # fmt: skip
        with LLM(write_shape(args.shape, folder), **options) as llm:
            for requests, used in args.loads:
                load = (prompts[:requests], adapters[:used], args.output_len, args.rounds)
                print(json.dumps(measure(llm, *load)), flush=True)


if __name__ == "__main__":
    main()
