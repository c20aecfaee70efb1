"""Compare decode and prefill on the CPU with llama.cpp's, with weights of 16, 8 and 4 bits.

    python benchmarks/llama.py --llama-python ~/llama/bin/python [--rounds 3] [--threads 4] [--long]
        [--formats bfloat16 ...] [--file model.gguf qwen3-0.6b:Q4_K_M ...]

The other Python needs `llama-cpp-python`, built for this processor, and `gguf`. With `--file` both
engines have the same files: those with these paths, or random weights by SHAPE:FORMAT. Else both
have random weights of Qwen3-0.6B's shape, and ours its own formats. Each format or file has a
process of its own for each engine that stays, and one of them computes at a time. llama.cpp draws
no tokens, as in its own benchmarks; ours are greedy. With one thread the seconds are those of the
processor, else of the clock. Reported are medians of the rounds, and medians of the ratios of a
round.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_files import CONTEXT, gguf_file
from llama_peer import Measure, clock, prompts, serve

ROOT = Path(__file__).resolve().parents[1]  # to import this checkout
PEER = Path(__file__).with_name("llama_peer.py")
# Requests, tokens of a prompt, and tokens that are decoded; 0: the prompt is measured.
Measures = dict[str, tuple[int, int, int]]
MEASURES = {"1 request": (1, 16, 32), "16 requests": (16, 16, 16), "prefill": (1, 512, 0)}
LONG = {"prefill of 4,096": (1, 4096, 0), "1 request at 8,192": (1, 8192, 32)}
ROOM, LONG_ROOM = (16, 512), (1, 8448)  # llama.cpp's sequences, and the tokens of each
SHAPE = "qwen3-0.6b"
PAIRS = [("bfloat16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_0"), ("int4", "Q4_K_M")]
Pairs = list[tuple[str, str]]


def ours(name: str, folder: Path, threads: int, length: int) -> Measure:
    """nanovllm with a GGUF file, or with one of its own formats."""
    import torch

    from nanovllm import LLM, SamplingParams
    from nanovllm.bench.shapes import write_shape

    torch.set_num_threads(threads)
    model, options = name, {}
    if not name.endswith(".gguf"):
        (folder / "shape").mkdir(exist_ok=True)
        model = write_shape(SHAPE, folder / "shape")
        options = dict(load_format="dummy", quantization=None if name == "bfloat16" else name)
    llm = LLM(model, device="cpu", cpu_kvcache_gib=1, max_model_len=length, **options)

    def measure(requests: int, size: int, tokens: int, index: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
        for prompt in prompts(requests, size, index):
            llm.add_request(prompt, params)
        start = clock(threads)
        for _ in range(0, requests * size, llm.config.max_num_batched_tokens):
            llm.step()  # at last all prompts are computed, and have their first tokens
        if not tokens:
            assert llm.is_finished()
            return requests * size / (clock(threads) - start)
        start = clock(threads)
        while not llm.is_finished():
            llm.step()
        return requests * tokens / (clock(threads) - start)

    return measure


def start(name: str, is_ours: bool, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that serves one format or file, and is ready."""
    if is_ours:
        command = [sys.executable, __file__, "--serve", name,
                   "--folder", str(args.folder), "--threads", str(args.threads),
                   *["--long"] * args.long]  # fmt: skip
    else:
        room = LONG_ROOM if args.long else ROOM
        command = [args.llama_python, str(PEER), name, str(args.folder),
                   *map(str, (args.threads, *room))]  # fmt: skip
    env = os.environ | ({"PYTHONPATH": str(ROOT)} if is_ours else {})
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=env)  # fmt: skip
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        sys.exit(f"{name} has failed")
    return child


def served(name: str, is_ours: bool, args: argparse.Namespace) -> str:
    """What a process is asked to serve under this name of the report."""
    if not args.file:
        return name if is_ours else f"{SHAPE}:{name}"
    file = name.partition(" ")[2]
    return str(gguf_file(file, args.folder, args.threads)) if is_ours else file


def take_turns(
    children: dict[str, subprocess.Popen[str]], rounds: int, measures: Measures = MEASURES
) -> dict[str, dict[str, list[float]]]:
    """The figures of each measure and format, by round. Round 0 warms up and is not kept."""
    figures = {measure: {name: [] for name in children} for measure in measures}
    for index in range(rounds + 1):
        for at, (measure, counts) in enumerate(measures.items()):
            for name, child in children.items():
                assert child.stdin is not None and child.stdout is not None
                print(*counts, index * len(measures) + at, file=child.stdin, flush=True)
                figure = float(child.stdout.readline())
                if index:
                    figures[measure][name].append(figure)
                    print(f"round {index}, {measure}, {name}: {figure:.1f}", file=sys.stderr)
    return figures


def report(
    figures: dict[str, dict[str, list[float]]], pairs: Pairs = PAIRS
) -> list[dict[str, Any]]:
    """Print a line for each measure and pair of names, and return what is in them."""
    rows = []
    for measure, of in figures.items():
        for our, their in pairs:
            ratios = [a / b for a, b in zip(of[our], of[their], strict=True)]
            ratio = statistics.median(ratios)
            tok_s, their_tok_s = statistics.median(of[our]), statistics.median(of[their])
            print(f"{measure:>18}  {our:8} {tok_s:6.1f}  {their:6} {their_tok_s:6.1f}"
                  f"  {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
            rows.append(dict(measure=measure, ours=our, theirs=their, tok_s=tok_s,
                             their_tok_s=their_tok_s, ratio=ratio, ratios=ratios))  # fmt: skip
    return rows


def main() -> None:
    """Start all formats, let them take turns, and print the figures, at last as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--folder", type=Path, metavar="DIR",
                        default=Path(tempfile.gettempdir()) / "nanovllm-gguf")  # fmt: skip
    parser.add_argument("--file", nargs="+", default=[], metavar="FILE")
    formats = [*dict(PAIRS)]
    parser.add_argument("--formats", nargs="+", default=formats, choices=formats,
                        help="ours, if there are no files")  # fmt: skip
    parser.add_argument("--long", action="store_true", help="long prompts instead of short ones")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.serve:
        length = LONG_ROOM[1] if args.long else CONTEXT
        serve(ours(args.serve, args.folder, args.threads, length))
        return
    pairs = [(f"ours {file}", f"llama.cpp {file}") for file in args.file] or [
        pair for pair in PAIRS if pair[0] in args.formats
    ]
    with contextlib.ExitStack() as stack:
        children = {}
        for our, their in pairs:
            # llama.cpp first: it writes the file that ours reads.
            for name, is_ours in ((their, False), (our, True)):
                if name not in children:
                    children[name] = stack.enter_context(
                        start(served(name, is_ours, args), is_ours, args)
                    )
                    stack.callback(children[name].kill)
        measures = LONG if args.long else MEASURES
        rows = report(take_turns(children, args.rounds, measures), pairs)
    print(json.dumps({"benchmark": "llama", "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
