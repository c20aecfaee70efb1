"""Compare the times to the first token of an idle server and of the engine alone.

    python benchmarks/first_token.py [--shape qwen3-0.6b] [--rounds 40] [--pauses 0,50,1000]

Three engines of their own, with random weights, take turns: `LLM.stream` in this process,
`AsyncLLM.generate` with an engine in a process of its own, and `nanovllm serve`. Nothing else runs,
and before each request all of them rest for a pause, as a device that rests is slower at first.
Every request has a new prompt of `--prompt-len` token ids, and two tokens to generate. A line of
JSON for each pause has the medians in milliseconds, and those of the differences in a turn. Needs
Python 3.11.
"""

import argparse
import asyncio
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from constraints import make_tokenizer

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.bench.shapes import SHAPES, write_shape

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
START_SECONDS = 300


@contextmanager
def server(model: str, options: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server of the model, which runs during the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in (options | {"port": port}).items()
    ]
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", model, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            wait_until_served(process, connection)
            yield connection
    finally:
        process.terminate()
        process.wait()


def wait_until_served(process: Any, connection: http.client.HTTPConnection) -> None:
    """Return when the server answers; raise if its process ends, or after `START_SECONDS`."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except ConnectionError:
            connection.close()
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the server did not start")


def ask_llm(llm: LLM, prompt: list[int]) -> float:
    """Milliseconds until the first event of `LLM.stream`."""
    start = time.perf_counter()
    with closing(llm.stream(prompt, PARAMS)) as events:  # type: ignore[type-var]
        next(events)
        elapsed = time.perf_counter() - start
        list(events)
    return 1000 * elapsed


async def ask_async(llm: AsyncLLM, prompt: list[int]) -> float:
    """Milliseconds until the first event of `AsyncLLM.generate`."""
    start, elapsed = time.perf_counter(), 0.0
    async for _ in llm.generate(prompt, PARAMS):
        elapsed = elapsed or time.perf_counter() - start
    return 1000 * elapsed


def ask_server(connection: http.client.HTTPConnection, prompt: list[int]) -> float:
    """Milliseconds until the first bytes of a stream."""
    fields = dict(temperature=0, max_tokens=2, ignore_eos=True, stream=True)
    start = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(fields | {"prompt": prompt}), headers)
    with connection.getresponse() as response:
        data = response.read1()
        elapsed = time.perf_counter() - start
        if response.status != 200:
            raise RuntimeError((data + response.read()).decode())
        response.read()
    return 1000 * elapsed


def measure(args: argparse.Namespace, model: str, options: dict[str, Any]) -> None:
    """Print a line for each pause."""
    rng = random.Random(0)
    vocab_size = SHAPES[args.shape][6]
    with (
        LLM(model, **options) as llm,
        asyncio.Runner() as runner,
        closing(AsyncLLM(model, **options)) as async_llm,
        server(model, options) as connection,
    ):
        cases = {
            "stream": lambda prompt: ask_llm(llm, prompt),
            "async": lambda prompt: runner.run(ask_async(async_llm, prompt)),
            "server": lambda prompt: ask_server(connection, prompt),
        }

        def turn(pause: float) -> dict[str, float]:
            taken = {}
            for name in rng.sample([*cases], len(cases)):
                prompt = rng.choices(range(1000, vocab_size), k=args.prompt_len)
                time.sleep(pause / 1000)
                taken[name] = cases[name](prompt)
            return taken

        for pause in map(float, args.pauses.split(",")):
            for _ in range(3):
                turn(0)
            rounds = args.rounds if pause < 500 else max(1, args.rounds // 3)
            turns = [turn(pause) for _ in range(rounds)]
            figures = {
                name: round(statistics.median(taken[name] for taken in turns), 2) for name in cases
            }
            for name in ("async", "server"):
                differences = [taken[name] - taken["stream"] for taken in turns]
                figures[f"{name}_later"] = round(statistics.median(differences), 2)
            print(json.dumps({"pause_ms": pause, **figures}), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=40, metavar="N")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N")
    parser.add_argument("--pauses", default="0,50,1000", metavar="MS,...")
    args = parser.parse_args()
    options = dict(load_format="dummy", max_model_len=2048, num_kvcache_blocks=512, max_num_seqs=16)
    with tempfile.TemporaryDirectory() as directory:
        write_shape(args.shape, Path(directory))
        make_tokenizer(SHAPES[args.shape][6]).save_pretrained(directory)
        measure(args, directory, options)


if __name__ == "__main__":
    main()
