"""The work of an AsyncLLM's and a server's process for each token, without a model.

    python benchmarks/front.py [--requests 768] [--streams 256] [--step-ms 0.8]

The engine's process runs the real scheduler and sends the real messages, but its steps compute
nothing: they take `--step-ms`, and draw tokens of a vocabulary of 30,000. Prompts have 128 tokens
and answers 256. A line of JSON for each case:

    events, whole      callers of `AsyncLLM.generate` and `AsyncLLM.complete`
    server             streams of the HTTP server, which `nanovllm bench serve` asks for
    tokens_per_second  of all callers together
    front_us           CPU time of the process of the callers, or of the server, for each token
"""

import argparse
import asyncio
import functools
import json
import random
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from constraints import make_tokenizer
from front_engine import VOCAB

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.bench.shapes import write_shape
from nanovllm.engine.remote import process
from nanovllm.server.app import make_app
from nanovllm.server.http_server import HTTPServer
from nanovllm.server.options import ServerOptions
from nanovllm.server.serve import default_params

PROMPT, OUTPUT = 128, 256
SEQS = 256


def idle_llm(model: str, step_ms: float) -> AsyncLLM:
    """An AsyncLLM with an engine that computes nothing."""
    start = process.start_process

    def start_idle(_: str, arguments: tuple[int, ...], fds: tuple[int, ...]) -> Any:
        return start("front_engine", (round(1000 * step_ms), *arguments), fds)

    process.start_process = start_idle
    try:
        return AsyncLLM(
            model, device="cpu", load_format="dummy", overlap=True, max_num_seqs=SEQS,
            max_model_len=1024, kvcache_block_size=64, num_kvcache_blocks=SEQS * 8,
        )  # fmt: skip
    finally:
        process.start_process = start


async def call(llm: AsyncLLM, requests: int, streams: int, is_whole: bool) -> tuple[int, float]:
    """Let callers in this process ask; returns how many tokens they got, in what time."""
    rng = random.Random(1)
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=OUTPUT)
    prompts = iter([rng.choices(range(VOCAB), k=PROMPT) for _ in range(requests)])

    async def caller() -> int:
        number = 0
        for prompt in prompts:
            if is_whole:
                number += len((await llm.complete(prompt, params))["token_ids"])
            else:
                async for event in llm.generate(prompt, params):
                    number += len(event["token_ids"])
        return number

    start = time.perf_counter()
    number = sum(await asyncio.gather(*(caller() for _ in range(streams))))
    return number, time.perf_counter() - start


async def serve(llm: AsyncLLM, requests: int, streams: int) -> tuple[int, float]:
    """Let `nanovllm bench serve` ask a server in this process."""
    app, _ = make_app(llm, ServerOptions(), default_params(llm, {}))
    server = HTTPServer(app, ServerOptions())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nanovllm", "bench", "serve", "--json", "--ignore-eos",
        "--base-url", f"http://127.0.0.1:{port}", "--max-concurrency", str(streams),
        "--num-prompts", str(requests), "--input-len", str(PROMPT), "--output-len", str(OUTPUT),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    output, _ = await client.communicate()
    server.should_exit = True
    await serving
    found = json.loads(output)
    return found["output_tokens"], found["seconds"]


async def measure(model: str, options: argparse.Namespace) -> None:
    """Measure all cases."""
    cases = {
        "events": functools.partial(call, is_whole=False),
        "whole": functools.partial(call, is_whole=True),
        "server": serve,
    }
    for case, ask in cases.items():
        async with idle_llm(model, options.step_ms) as llm:
            await call(llm, options.streams, options.streams, is_whole=False)  # each token's text
            cpu = time.process_time()
            number, seconds = await ask(llm, options.requests, options.streams)
            cpu = time.process_time() - cpu
            figures = {"tokens_per_second": round(number / seconds)}
            print(json.dumps({"case": case, **figures, "front_us": round(1e6 * cpu / number, 1)}))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_shape("qwen3-42m", Path(directory))
        make_tokenizer(VOCAB).save_pretrained(directory)
        asyncio.run(measure(directory, options))


if __name__ == "__main__":
    main()
