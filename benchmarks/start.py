"""Measure how long an engine takes to start: a process with no kernels compiled, and the next one.

    python benchmarks/start.py [--shape qwen3-8b] [--against DIR] [--max-model-len 4096]

Each start is a process that imports nanovllm, makes an engine with random weights, and ends. Before
the first start of a round, Triton's cache is empty; the CPU's compiled kernels stay. `--against`
names another checkout, which takes turns. It prints seconds of whole processes, and those of `LLM`
in parentheses; the last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
START = """
import json, sys, time
from nanovllm import LLM
start = time.perf_counter()
LLM(sys.argv[1], load_format="dummy", **json.loads(sys.argv[2]))
print(time.perf_counter() - start)
"""


def start(checkout: Path, model: Path, cache: Path, options: str) -> tuple[float, float]:
    """The seconds that a process of `checkout` takes to start, and those of its `LLM`."""
    env = os.environ | {"PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", START, str(model), options]
    began = time.perf_counter()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - began, float(done.stdout)


def main() -> None:
    """Print a line for each start, and one of JSON."""
    sys.path.insert(0, str(ROOT))
    from nanovllm.bench.shapes import SHAPES, write_shape

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--max-model-len", type=int, default=4096, metavar="N")
    args = parser.parse_args()
    checkouts = {"here": ROOT, **({"there": args.against} if args.against else {})}
    options = json.dumps({"max_model_len": args.max_model_len})
    seconds: dict[str, list[tuple[float, float]]] = {}
    with TemporaryDirectory() as folder:
        write_shape(args.shape, Path(folder))
        for number in range(args.rounds):
            for order in ("first", "second"):
                for name, checkout in checkouts.items():
                    cache = Path(folder) / f"{name}-{number}"
                    taken = start(checkout, Path(folder), cache, options)
                    seconds.setdefault(f"{order} start {name}", []).append(taken)
                    print(f"{order} start {name}: {taken[0]:.1f} s ({taken[1]:.1f})", flush=True)
    print(json.dumps({"shape": args.shape, "seconds": seconds}))


if __name__ == "__main__":
    main()
