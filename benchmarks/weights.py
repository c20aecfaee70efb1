"""Measure updates of weights and sleep, each with the copy that bounds it.

    python benchmarks/weights.py [--size 8b] [--device cuda] [--ranks 1] [--quantization fp8]

The model has the shape of Qwen3-8B and random weights. `update_weights` gets tensors that are on
the device, and is compared with one copy of as many bytes there; `wake_up` after `sleep(level=1)`
is compared with a copy from pinned memory. Memory is what the driver calls free. Greedy answers
before and after are compared. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanovllm import LLM, SamplingParams

COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "8b": dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
               num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "0.6b": dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=16),
}  # fmt: skip
CHUNK = 1 << 28  # bytes of a copy from the host
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str) -> float:
    """How long a call takes, with what it launches."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median of several calls, after a first one."""
    call()
    return statistics.median(seconds(call, device) for _ in range(repeats))


def used_bytes(device: str) -> int:
    """What is not free: of the device, or this process's resident memory."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def device_copy_seconds(num_bytes: int, device: str, repeats: int) -> float:
    """One copy from device to device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_seconds(lambda: target.copy_(source), device, repeats)


def host_copy_seconds(num_bytes: int, device: str, repeats: int) -> float:
    """A copy of as many bytes from pinned memory, in chunks."""
    source = torch.ones(min(CHUNK, num_bytes), dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(source.shape, dtype=torch.uint8, device=device)

    def copy() -> None:
        for _ in range(-(-num_bytes // len(source))):
            target.copy_(source, non_blocking=True)

    return median_seconds(copy, device, repeats)


def random_weights(llm: LLM, device: str) -> dict[str, torch.Tensor]:
    """New weights on the device, by the checkpoint's names."""
    generator = torch.Generator(device=device).manual_seed(1)
    weights = {}
    for name, shape in llm.weight_shapes().items():
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        is_norm = len(shape) == 1
        weights[name] = values.fill_(1) if is_norm else values.normal_(0, 0.02, generator=generator)
    return weights


def answers(llm: LLM) -> list[list[int]]:
    """Greedy tokens of a few prompts."""
    prompts = [[1, 2, 3], [*range(5, 40)]]
    return [output["token_ids"] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one engine."""
    device, repeats = args.device, args.repeats
    if device == "cuda":
        torch.cuda.init()
        torch.empty(1, device="cuda")
    before = used_bytes(device)
    options: dict[str, Any] = dict(
        device=device, dtype="bfloat16", load_format="dummy", enable_sleep_mode=True,
        max_model_len=1024, max_num_seqs=16, gpu_memory_utilization=0.5, cpu_kvcache_gib=0.5,
        tensor_parallel_size=args.ranks, quantization=args.quantization,
    )  # fmt: skip
    with LLM(path, **options) as llm:
        first_answers = answers(llm)
        engine = used_bytes(device) - before
        weights = random_weights(llm, device)
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        first_update = seconds(lambda: llm.update_weights(weights), device)
        update = median_seconds(lambda: llm.update_weights(weights), device, repeats)
        new_answers = answers(llm)
        figures = {
            "first_update_s": first_update, "update_s": update,
            "device_copy_s": device_copy_seconds(num_bytes, device, repeats),
        }  # fmt: skip
        weights.clear()
        sleeps, wakes, returned = [], [], 0.0
        for _ in range(2):  # the first sleep pins memory of the host
            if device == "cuda":
                torch.cuda.empty_cache()
            full = used_bytes(device)
            sleeps.append(seconds(lambda: llm.sleep(level=1), device))
            returned = (full - used_bytes(device)) / engine
            wakes.append(seconds(llm.wake_up, device))
        same = answers(llm) == new_answers
        level_2 = seconds(lambda: llm.sleep(level=2), device)
        wake_2 = seconds(llm.wake_up, device)
        restored = answers(llm) == first_answers
        figures |= {
            "first_sleep_s": sleeps[0], "sleep_s": sleeps[1], "wake_up_s": wakes[1],
            "host_copy_s": host_copy_seconds(num_bytes, device, repeats),
            "sleep_level_2_s": level_2, "wake_up_and_load_s": wake_2,
        }  # fmt: skip
    return {
        **{name: round(value, 5) for name, value in figures.items()},
        "weights_gb": round(num_bytes / 1e9, 3), "engine_gb": round(engine / 1e9, 3),
        "update_ratio": round(figures["update_s"] / figures["device_copy_s"], 2),
        "wake_up_ratio": round(figures["wake_up_s"] / figures["host_copy_s"], 2),
        "returned_percent": round(100 * returned, 1),
        "same_after_sleep": same, "same_after_reload": restored,
        "changed_by_update": new_answers != first_answers,
    }  # fmt: skip


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        config = json.dumps(COMMON | SIZES[args.size])
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        figures = measure(Path(folder), args)
    for name, value in figures.items():
        print(f"{name:20} {value}")
    print(json.dumps({"size": args.size, "device": args.device, "ranks": args.ranks, **figures}))


if __name__ == "__main__":
    main()
