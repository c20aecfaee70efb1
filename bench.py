"""Throughput of offline generation, and the roofline of the same workload on the same machine.

    python bench.py                        # 256 requests, 100-1024 tokens in and out, Qwen3-0.6B
    python bench.py --shape qwen3-8b       # or llama-3-8b, qwen2.5-7b, qwen3-30b-a3b, ...
    python bench.py --model ~/models/Qwen3-0.6B --repeats 5 --json result.json
    python bench.py --peers --peer-python vllm=~/vllm/bin/python    # other engines, same workload
    python bench.py --profile trace.json   # and where the time goes, for Perfetto

A shape needs no download: random weights take the time that trained ones take. The roofline comes
first: two rates measured here, and the least time in which they allow the workload. Decode only
reads, and a CPU may read faster than it copies. The last line on stdout is one JSON object.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, step_trace
from nanovllm import LLM, SamplingParams, __version__
from nanovllm.config import ATTENTION_BACKENDS, DTYPES, SCHEDULINGS, Config
from nanovllm.engine.device import resolve_device, resolve_dtype
from nanovllm.layers.linear import LinearBase
from nanovllm.models.config import ModelConfig
from nanovllm.utils import roofline
from nanovllm.utils.loader import resolve_model
from nanovllm.utils.ranks import Ranks
from nanovllm.utils.roofline import Machine

TEMPERATURE = 0.6
MAX_TOKEN_ID = 10_000
MAX_MODEL_LEN = 4096
SHORT_RUN_SECONDS = 60  # a run below this is repeated, if --repeats does not say how often
SLOW_FLOOR_SECONDS = 60  # a floor above this earns a hint at smaller options
WORKLOAD_OPTIONS = (
    "num_seqs", "min_input_len", "max_input_len", "min_output_len", "max_output_len", "seed",
)  # fmt: skip
ENGINE_OPTIONS = (
    "device", "dtype", "enforce_eager", "attention_backend", "max_num_seqs",
    "max_num_batched_tokens", "num_kvcache_blocks", "tensor_parallel_size", "overlap", "scheduling",
)  # fmt: skip

PEER_OPTIONS = ("max_model_len", "tensor_parallel_size", "enforce_eager")  # named alike everywhere
PEER_LIMITS = ("max_num_seqs", "max_num_batched_tokens")

# hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied
SHAPES = {
    "qwen3-42m": (512, 1536, 8, 8, 4, 64, 32_000, True),  # small enough for two CPU cores
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151_936, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151_936, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 128, 151_936, False),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128_256, False),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, 152_064, False),
}
# What is in the config.json of those that are not dense Qwen3.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "llama-3-8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=500_000,
        max_position_embeddings=8192, rms_norm_eps=1e-5,
    ),
    "qwen2.5-7b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=32_768
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]


def write_shape(name: str, path: Path) -> str:
    """Make `path` a model directory of a shape: its `config.json` and nothing else."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab_size, tied = SHAPES[name]
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu",
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=vocab_size, tie_word_embeddings=tied, max_position_embeddings=40_960,
        rms_norm_eps=1e-6, rope_theta=1_000_000, attention_bias=False, torch_dtype="bfloat16",
    ) | OTHERS.get(name, {})  # fmt: skip
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(path)


def draw_workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    """Draw the requests in the order in which nano-vllm's bench.py draws them."""
    rng = random.Random(args.seed)
    high = min(MAX_TOKEN_ID, vocab_size - 1)
    prompts = [
        [rng.randint(0, high) for _ in range(rng.randint(args.min_input_len, args.max_input_len))]
        for _ in range(args.num_seqs)
    ]
    lens = [rng.randint(args.min_output_len, args.max_output_len) for _ in range(args.num_seqs)]
    return Workload(prompts, lens)


def median_seconds(call: Callable[[], Any], device: torch.device, samples: int = 7) -> float:
    """Median time of `call`; on CUDA a sample is many calls, which hides their launches."""
    calls = 20 if device.type == "cuda" else 1
    seconds = []
    for _ in range(1 + samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])  # the first sample warms up


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    num_bytes = 1 << (30 if device.type == "cuda" else 28)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large linear layer, as the model computes it."""
    size = 8192 if device.type == "cuda" else 2048
    linear = LinearBase(size, size).to(device, dtype)
    assert linear.weight is not None
    linear.weight.normal_()
    linear.pack()
    x = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / median_seconds(lambda: linear(x), device)


def measure_machine(device: torch.device, dtype: torch.dtype, num_ranks: int) -> Machine:
    """Measure both rates, and give back the memory that it took.

    Ranks on the CPU share one machine; on CUDA each brings a GPU, taken to be as fast as the first.
    """
    num_devices = num_ranks if device.type == "cuda" else 1
    machine = Machine(copy_rate(device) * num_devices, matmul_rate(device, dtype) * num_devices)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return machine


def machine_name() -> str:
    """The processor and its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def describe(
    args: argparse.Namespace, model: ModelConfig, workload: Workload, device: torch.device
) -> dict[str, Any]:
    """The first part of the result: where, which model, what, and the least time for it."""
    dtype = resolve_dtype(args.dtype, model.dtype, device)
    machine = measure_machine(device, dtype, args.tensor_parallel_size)
    input_lens = [len(prompt) for prompt in workload.prompts]
    floor = roofline.floor(model, dtype.itemsize, input_lens, workload.output_lens, machine)
    return {
        "version": __version__,
        "machine": machine_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_ranks": args.tensor_parallel_size,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "model": args.model or args.shape,
        "num_params": roofline.num_params(model),
        "dtype": str(dtype).removeprefix("torch."),
        "workload": {
            **{name: getattr(args, name) for name in WORKLOAD_OPTIONS},
            "temperature": TEMPERATURE,
            "input_tokens": sum(input_lens),
            "output_tokens": sum(workload.output_lens),
        },
        "roofline": {
            "copy_bytes_per_second": machine.bytes_per_second,
            "matmul_flops_per_second": machine.flops_per_second,
            **dataclasses.asdict(floor),
            "seconds": floor.seconds,
            "output_tokens_per_second": sum(workload.output_lens) / floor.seconds,
        },
    }


def time_run(llm: LLM, workload: Workload) -> float:
    """Seconds to generate the whole workload; every request runs to its length."""
    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n)
        for n in workload.output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output["token_ids"]) for output in outputs] == workload.output_lens
    return seconds


def measure(llm: LLM, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, run `--repeats` times, and say how fast that was."""
    vocab_size = llm.model_config.vocab_size
    time_run(llm, Workload([[0] * args.min_input_len], [min(16, args.min_output_len)]))
    before, preemptions = dataclasses.replace(llm.counter), llm.scheduler.num_preemptions
    seconds: list[float] = []
    repeats = args.repeats
    while repeats is None or len(seconds) < repeats:
        # Other tokens in each run: it must not find its prompts in the prefix cache.
        prompts = [[(t + len(seconds)) % vocab_size for t in prompt] for prompt in workload.prompts]
        seconds.append(time_run(llm, Workload(prompts, workload.output_lens)))
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
        / max(counter.decode_seconds - before.decode_seconds, 1e-9),  # no decode: one token each
        "preemptions": llm.scheduler.num_preemptions - preemptions,
    }


def print_floor(result: dict[str, Any]) -> None:
    """Say what will run, and how fast it could."""
    load, floor = result["workload"], result["roofline"]
    on_cpu = result["device"] == "cpu"
    ranks = f", {result['num_ranks']} ranks" if result["num_ranks"] > 1 else ""
    print(
        f"{result['model']}: {result['num_params'] / 1e6:,.0f}M parameters, {result['dtype']},"
        f" on {result['machine' if on_cpu else 'device']}{ranks}\n"
        f"  workload: {load['num_seqs']} requests, {load['input_tokens']:,} tokens in,"
        f" {load['output_tokens']:,} out\n"
        f"  measured: copy {floor['copy_bytes_per_second'] / 1e9:,.1f} GB/s,"
        f" matmul {floor['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s\n"
        f"  roofline: {floor['seconds']:.2f} s = {floor['decode_kv_seconds']:.2f} decode KV reads"
        f" + {floor['decode_gemm_seconds']:.2f} decode GEMM"
        f" + {floor['prefill_seconds']:.2f} prefill;"
        f" {floor['output_tokens_per_second']:,.0f} output tok/s"
    )
    if on_cpu and floor["seconds"] > SLOW_FLOOR_SECONDS:
        print(
            f"  a run takes {floor['seconds'] / 60:.0f} minutes at the very least. Smaller:"
            " --shape qwen3-42m, or --num-seqs 16 --max-input-len 128 --max-output-len 128"
        )
    sys.stdout.flush()


def print_result(result: dict[str, Any]) -> None:
    """Say how fast it was."""
    print(
        f"  {result['output_tokens_per_second']:,.1f} output tok/s,"
        f" {result['roofline_percent']:.1f}% of the roofline: median {result['median_seconds']:.2f}"
        f" s of {len(result['seconds'])},"
        f" {min(result['seconds']):.2f} to {max(result['seconds']):.2f}\n"
        f"  prefill {result['prefill_tokens_per_second']:,.0f} tok/s,"
        f" decode {result['decode_tokens_per_second']:,.0f} tok/s,"
        f" {result['preemptions']} preemptions, attention: {result['attention_backend']}"
    )


def positive(text: str) -> int:
    """Parse an int above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def number(name: str, default: int | None, text: str) -> None:
        shown = text if default is None else f"{text} (default: {default})"
        parser.add_argument(name, type=positive, default=default, metavar="N", help=shown)

    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="DIR", help="a model directory, or a hub id")
    model.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b",
                       help="random weights of this shape (default: %(default)s)")  # fmt: skip
    number("--num-seqs", 256, "requests")
    number("--min-input-len", 100, "shortest prompt")
    number("--max-input-len", 1024, "longest prompt")
    number("--min-output-len", 100, "fewest tokens to generate")
    number("--max-output-len", 1024, "most tokens to generate")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="draws the requests (default: %(default)s)")  # fmt: skip
    number("--repeats", None, "runs, or with --peers rounds, of which the median counts (default:"
           f" 3, or 1 if a run takes {SHORT_RUN_SECONDS} s)")  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    number("--tensor-parallel-size", 1, "ranks that share the model out, on CUDA a GPU each")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="begin a step before the last ends; it does on a GPU",
    )
    parser.add_argument("--scheduling", choices=SCHEDULINGS, default="prefill-first")
    parser.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    number("--max-num-seqs", 512, "sequences that may run at once")
    number("--max-num-batched-tokens", 16384, "tokens of one step")
    number("--max-model-len", None, f"longest sequence (default: {MAX_MODEL_LEN}, or the model's)")
    number("--num-kvcache-blocks", None, "KV blocks (default: as many as the memory holds)")
    parser.add_argument("--peers", nargs="*", metavar="NAME",
                        help=f"compare with {', '.join(peers.PEERS)}, or those that are found;"
                        " each round is a new process of each")  # fmt: skip
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH",
                        help="the Python that has this peer")  # fmt: skip
    parser.add_argument("--peer-path", action="append", default=[], metavar="NAME=DIR",
                        help="a folder to import this peer from, such as a checkout")  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="FILE",
                        help="after the measured runs, write a trace of a few steps")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line here too")
    return parser


def check_lengths(args: argparse.Namespace, max_model_len: int) -> None:
    """Refuse lengths that no draw or no sequence can have."""
    for kind in ("input", "output"):
        low, high = getattr(args, f"min_{kind}_len"), getattr(args, f"max_{kind}_len")
        if low > high:
            raise ValueError(f"--min-{kind}-len {low} is above --max-{kind}-len {high}")
    longest = args.max_input_len + args.max_output_len
    if longest > max_model_len:
        raise ValueError(
            f"--max-input-len and --max-output-len add up to {longest}, above {max_model_len},"
            " the longest sequence"
        )


def engine_options(args: argparse.Namespace, model: ModelConfig) -> dict[str, Any]:
    """The options of the engine; a shape has no files but its config."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS} | {
        "max_model_len": args.max_model_len or min(MAX_MODEL_LEN, model.max_position_embeddings),
        "load_format": "auto" if args.model else "dummy",
    }


def find_peers(args: argparse.Namespace) -> list[peers.Engine]:
    """The engines to compare: none if nothing asks for it."""
    if args.peers is None:
        if args.peer_python or args.peer_path:
            raise ValueError("--peer-python and --peer-path are for --peers")
        return []
    if args.profile:
        raise ValueError("--profile is for a run without --peers")
    return peers.find_engines(args.peers, args.peer_python, args.peer_path)


def compare(
    engines: list[peers.Engine], path: Path, workload: Workload, args: argparse.Namespace,
    result: dict[str, Any], device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Let the engines take turns, each in a process of its own.

    Peers share our limits of a batch where the command line sets them; else they keep their own.
    """
    if not args.model:
        peers.write_weights(path, result["dtype"], args.seed)
    ours = result["options"] | {"dtype": result["dtype"], "load_format": "auto"}
    parser = make_parser()
    shared = {name: ours[name] for name in PEER_OPTIONS} | {
        name: ours[name] for name in PEER_LIMITS if ours[name] != parser.get_default(name)
    }
    visible = peers.visible_devices(device, args.tensor_parallel_size)
    if visible:
        ours["device"] = "cuda"
    job = {
        "model": str(path), "device": device.type, "dtype": result["dtype"],
        "temperature": TEMPERATURE, "prompts": workload.prompts,
        "output_lens": workload.output_lens, "warmup": [0] * args.min_input_len,
    }  # fmt: skip
    jobs = {
        engine.name: job
        | {"engine": engine.name, "module": engine.module}
        | {"options": ours if engine.name == peers.OURS else shared}
        for engine in engines
    }
    runs = peers.take_turns(engines, jobs, args.repeats or peers.ROUNDS, visible)
    return peers.figures(runs, sum(workload.output_lens), result["roofline"]["seconds"])


def run_alone(
    llm: LLM, workload: Workload, args: argparse.Namespace, result: dict[str, Any]
) -> dict[str, Any]:
    """Measure this engine, print the figures, and then write a trace if one is asked for."""
    result |= measure(llm, workload, args)
    result["roofline_percent"] = 100 * result["roofline"]["seconds"] / result["median_seconds"]
    device = torch.device(llm.config.device)
    if device.type == "cuda":  # the KV pool counts too
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    print_result(result)
    if args.profile:
        print(step_trace.write_trace(llm, workload.prompts, TEMPERATURE, args.profile), flush=True)
    return result


@contextlib.contextmanager
def usage_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Report what is refused as an error of the command line, without a traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> None:
    """Print the roofline, run the workload, print the figures and one JSON line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        with usage_errors(parser):
            path = resolve_model(args.model or write_shape(args.shape, Path(scratch)))
            model = ModelConfig.from_dir(path)
            options = engine_options(args, model)
            check_lengths(args, options["max_model_len"])
            Config.from_options(path, options)
            model.check_parallel_size(args.tensor_parallel_size)
            device = resolve_device(args.device, Ranks(0, args.tensor_parallel_size))
            engines = find_peers(args)
            output = args.json.open("w", encoding="utf-8") if args.json else None
            if args.profile:
                args.profile.touch()
        workload = draw_workload(args, model.vocab_size)
        result = describe(args, model, workload, device) | {"options": options}
        print_floor(result)
        if engines:
            result["engines"] = compare(engines, path, workload, args, result, device)
            peers.print_figures(result["engines"])
        else:
            with usage_errors(parser):
                llm = LLM(path, **options)
            with llm:
                result = run_alone(llm, workload, args, result)
    line = json.dumps(result)
    print(line)
    if output:
        output.write(line + "\n")
        output.close()
    if any("error" in row for row in result.get("engines", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
