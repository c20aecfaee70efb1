"""Compare how long prompts take until their first token with another engine's, in turns.

    python benchmarks/prompt_times.py [--shape qwen3-0.6b] [--rounds 20]
        [--prompts 1x16 1x128 1x512 1x2048 8x64 64x64] [--way generate|async]
        [--peer-python vllm=~/vllm/bin/python] [--options '{"attention_backend": "triton"}']

Each engine stays in a process of its own, with random weights, and one computes at a time. A turn
gives each of them the same number of new prompts of the same length, all at once, with one greedy
token each. Times are from the call to its return, in the engine's process: of `LLM.generate`, or
with `--way async` of as many calls of our `AsyncLLM.generate`. A line for each kind of prompts has
medians in milliseconds and the quartiles; the last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers import Engine

FOLDER = Path(__file__).resolve().parent
OURS = "nanovllm"

WARMUPS = 3
SHARE = 0.4  # of the GPU's memory for each of two engines
Ask = Callable[[list[list[int]]], None]


def ours(model: str, way: str, options: dict[str, Any]) -> Ask:
    """nanovllm, by the facade or by the asynchronous one."""
    from nanovllm import LLM, AsyncLLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    if way == "generate":
        llm = LLM(model, load_format="dummy", **options)
        return lambda prompts: void(llm.generate(prompts, params, use_tqdm=False))
    runner, engine = asyncio.Runner(), AsyncLLM(model, load_format="dummy", **options)

    async def one(prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    async def all_of(prompts: list[list[int]]) -> None:
        await asyncio.gather(*map(one, prompts))

    return lambda prompts: runner.run(all_of(prompts))


def vllm(model: str) -> Ask:
    """vLLM's offline engine. Its packages must not find this folder's modules."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
        gpu_memory_utilization=SHARE,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(prompts: list[list[int]]) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return ask


def void(_: object) -> None:
    """Drop a result."""


def serve(name: str, model: str, way: str, options: dict[str, Any]) -> None:
    """Answer each line of prompts on stdin with milliseconds, on the real stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to stderr
    ask = ours(model, way, options) if name == OURS else vllm(model)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        start = time.perf_counter()
        ask(prompts)
        print(json.dumps(1000 * (time.perf_counter() - start)), file=answers, flush=True)


class Served:
    """An engine in a process."""

    def __init__(
        self, engine: "Engine", model: str, way: str, options: str, stack: contextlib.ExitStack
    ) -> None:
        command = [engine.python, __file__, "--serve", engine.name, model, way, options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=engine.env()
        )
        stack.callback(self.close)
        self.name = engine.name
        self.read()

    def close(self) -> None:
        """End the process: it ends by itself when its input ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def read(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended; its errors are above")
        return json.loads(line)

    def ask(self, prompts: list[list[int]]) -> float:
        """Milliseconds for these prompts."""
        assert self.process.stdin is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return float(self.read())


def measure(engines: list[Served], kinds: list[str], rounds: int, seed: int = 0) -> list[Any]:
    """Rows of figures, printed as they come."""
    rng, rows = random.Random(seed), []
    for kind in kinds:
        count, length = map(int, kind.split("x"))
        taken: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for turn in range(WARMUPS + rounds):
            for engine in rng.sample(engines, len(engines)):
                prompts = [rng.choices(range(1000, 30000), k=length) for _ in range(count)]
                milliseconds = engine.ask(prompts)
                if turn >= WARMUPS:
                    taken[engine.name].append(milliseconds)
        row: dict[str, Any] = {"prompts": kind}
        for name, values in taken.items():
            low, middle, high = statistics.quantiles(values, n=4)
            row[name] = {"ms": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
        text = "  ".join(
            f"{name} {row[name]['ms']:8.2f} ({row[name]['quartiles'][0]:.2f} to"
            f" {row[name]['quartiles'][1]:.2f})" for name in taken
        )  # fmt: skip
        print(f"{kind:>8}: {text} ms", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--serve"]:
        name, model, way, options = sys.argv[2:]
        serve(name, model, way, json.loads(options))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--way", default="generate", choices=["generate", "async"])
    usual = ["1x16", "1x128", "1x512", "1x2048", "8x64", "64x64"]
    parser.add_argument("--prompts", nargs="+", default=usual, metavar="COUNTxLENGTH")
    parser.add_argument("--peer-python", nargs="+", default=[], metavar="vllm=PYTHON")
    parser.add_argument("--options", default="{}", metavar="JSON", help="of our engine")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2, for quartiles")
    from peers import ROOT, Engine, pairs, program

    sys.path.insert(0, str(ROOT))
    options = json.loads(args.options)
    if args.peer_python:
        options.setdefault("gpu_memory_utilization", SHARE)
    engines = [Engine(OURS, OURS, path=str(ROOT))]
    for name, python in pairs("--peer-python", args.peer_python).items():
        engines.append(Engine(name, name, program(python)))
    with tempfile.TemporaryDirectory() as folder:
        from nanovllm.bench.shapes import write_shape

        write_shape(args.shape, Path(folder))
        with contextlib.ExitStack() as stack:
            served = [
                Served(engine, folder, args.way, json.dumps(options), stack) for engine in engines
            ]
            rows = measure(served, args.prompts, args.rounds)
    figures = {"shape": args.shape, "way": args.way, "rounds": args.rounds, "rows": rows}
    print(json.dumps({"benchmark": "prompt_times", **figures}))


if __name__ == "__main__":
    main()
