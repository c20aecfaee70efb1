"""Throughput of offline generation, and the roofline of the same workload on the same machine.

    python bench.py                        # 256 requests, 100-1024 tokens in and out, Qwen3-0.6B
    python bench.py --shape qwen3-8b       # or llama-3-8b, qwen2.5-7b, qwen3-30b-a3b, ...
    python bench.py --model ~/models/Qwen3-0.6B --repeats 5 --json result.json
    python bench.py --peers --peer-python vllm=~/vllm/bin/python    # other engines, same workload
    python bench.py --profile trace.json   # also write a trace for Perfetto

This is `nanovllm bench` with another default model and with a comparison of engines. The comparison
needs a checkout, as the code that starts other engines is not part of the package.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers
from nanovllm.bench.plan import Plan
from nanovllm.command import bench
from nanovllm.command.guard import run_guarded
from nanovllm.command.options import UsageError, usage_errors
from nanovllm.command.parser import Parser, add_common_arguments, finish
from nanovllm.config import Config

SHAPE = "qwen3-0.6b"
PEER_OPTIONS = (
    "max_model_len",
    "tensor_parallel_size",
    "enforce_eager",
)  # the same names in all engines
PEER_LIMITS = ("max_num_seqs", "max_num_batched_tokens")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add_common_arguments(parser, False)
    bench.add_arguments(parser, SHAPE)
    group = parser.add_argument_group("peers")
    group.add_argument("--peers", nargs="*", metavar="NAME",
                       help=f"compare with these engines of {', '.join(peers.PEERS)} (default:"
                       f" those that are found), in --repeats rounds (default: {peers.ROUNDS});"
                       " each engine has a new process in each round")  # fmt: skip
    group.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH",
                       help="the Python that runs this peer")  # fmt: skip
    group.add_argument("--peer-path", action="append", default=[], metavar="NAME=DIR",
                       help="a folder to import this peer from, such as a checkout")  # fmt: skip
    finish(parser)
    return parser


def find_peers(args: argparse.Namespace) -> list[peers.Engine]:
    """The engines to compare; none without --peers."""
    if args.peers is None:
        if args.peer_python or args.peer_path:
            raise UsageError("--peer-python and --peer-path need --peers")
        return []
    if args.profile:
        raise UsageError("--profile and --peers exclude each other")
    if getattr(args, "acceptance", None) is not None:
        raise UsageError("--acceptance and --peers exclude each other")
    with usage_errors():
        return peers.find_engines(args.peers, args.peer_python, args.peer_path)


def engine_options(
    result: dict[str, Any], on_visible_gpus: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of our engine, and those of peers.

    Peers get our limits of a batch if the command line sets them, and keep their own otherwise.
    """
    ours = result["options"] | {"dtype": result["dtype"], "load_format": "auto"}
    if on_visible_gpus:
        ours["device"] = "cuda"
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    theirs = {name: ours[name] for name in PEER_OPTIONS} | {
        name: ours[name] for name in PEER_LIMITS if ours[name] != defaults[name]
    }
    return ours, theirs


def compare(
    engines: list[peers.Engine], args: argparse.Namespace, plan: Plan, result: dict[str, Any]
) -> None:
    """Run the engines in turns, each in its own process, and add their figures to `result`.

    Each engine gets the same job, with its own options.
    """
    path, workload = Path(plan.config.model), plan.workload
    if plan.shape is not None:
        peers.write_weights(path, result["dtype"], plan.lengths.seed)
    visible = peers.visible_devices(plan.device, plan.config.tensor_parallel_size)
    ours, theirs = engine_options(result, bool(visible))
    job = {
        "model": str(path), "device": plan.device.type, "dtype": result["dtype"],
        "temperature": plan.lengths.temperature, "prompts": workload.prompts,
        "output_lens": workload.output_lens, "warmup": [0] * plan.lengths.min_input_len,
    }  # fmt: skip
    jobs = {
        engine.name: job
        | {"engine": engine.name, "module": engine.module}
        | {"options": ours if engine.name == peers.OURS else theirs}
        for engine in engines
    }
    runs = peers.take_turns(engines, jobs, args.repeats or peers.ROUNDS, visible)
    floor = result["roofline"]["seconds"]
    result["engines"] = peers.figures(runs, sum(workload.output_lens), floor)
    peers.print_figures(result["engines"])


def run(args: argparse.Namespace) -> int:
    """Measure this engine alone, or compare engines; return 1 if one of them has failed."""
    engines = find_peers(args)
    if not engines:
        return bench.run(args)
    failures: list[str] = []

    def measure(plan: Plan, result: dict[str, Any]) -> None:
        compare(engines, args, plan, result)
        failures.extend(name for name, row in result["engines"].items() if "error" in row)

    bench.run(args, measure)
    return 1 if failures else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the status."""
    return run_guarded(run, make_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
