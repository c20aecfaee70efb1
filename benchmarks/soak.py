"""Many kinds of requests at random, for an hour: all get an expected answer, and nothing grows.

    python benchmarks/soak.py [--seconds 3600] [--clients 24] [--seed 0] [-- SERVER OPTIONS]

`nanovllm serve` serves the embedded model with adapters, sleep and all limits. Clients complete,
chat, embed, score, tokenize, send odd bodies and attacks, leave in the middle of streams, and are
killed. Meanwhile adapters are loaded and removed, and the engine sleeps and wakes up. Once a minute
all rest, and a line of JSON has the memory of both processes, their open files and threads, and how
many answers had each status. The exit status is 1 after a status that is not expected, a traceback
in the log, a wrong greedy answer, or if from the end of the first fifth to the last line memory has
grown by more than 50 MiB, or files or threads by more than a pool's threads.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from attack import send
from attacks import CHAT, COMPLETIONS, attacks
from safetensors.torch import save_file
from served import Served, served

from nanovllm.bench.serve.client import Body
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

# 499 is a client that has left; 503 is an engine that sleeps.
EXPECTED = (200, 400, 404, 408, 409, 413, 415, 429, 431, 499, 503)
ADAPTERS = ("one", "two", "three")
SLOW_ATTACKS = ("half requests", "an endless header", "1,000,000 headers")
PERIOD = 60.0  # seconds between two lines
MIB_GROWN, THREADS = 50.0, 2  # a pool starts its threads when it first needs them
KILLED = """
import http.client, sys
one = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
one.request("POST", "/v1/completions", sys.argv[3])
while one.getresponse().read(64): pass
"""


def write_adapter(path: Path, seed: int) -> None:
    """Write a random adapter for the embedded model, as peft saves it."""
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        start = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        tensors[f"{start}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.05
        tensors[f"{start}.lora_B.weight"] = torch.randn(256, 4, generator=generator) * 0.05
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


class Soak:
    """Clients of one server."""

    def __init__(self, server: Served, adapters: Path, rng: random.Random) -> None:
        self._server, self._adapters, self._rng = server, adapters, rng
        self._problems = sample_problems(500)
        self._attacks = {
            name: make() for name, make in attacks().items() if name not in SLOW_ATTACKS
        }
        self.statuses: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self._sum), (20, self._sampled), (8, self._chat), (8, self._vectors),
            (6, self._tokens), (10, self._leave), (10, self._odd), (2, self._killed),
            (2, self._attack), (2, self._adapter), (1, self._sleep),
        ]  # fmt: skip

    async def client(self, until: float) -> None:
        """Ask for something, again and again."""
        weights, kinds = zip(*self._kinds, strict=True)
        while time.monotonic() < until:
            (kind,) = self._rng.choices(kinds, weights)
            try:
                await kind()
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _post(self, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = Body()
        head = await self._server.client.send(
            self._server.client.request(method, path, data), answer
        )
        self.statuses[str(head.status)] += 1
        if head.status not in EXPECTED:
            self.wrong.append(f"{path} {head.status}: {answer.data[:300]!r} for {data[:300]!r}")
        return head.status, answer.data

    async def _sum(self) -> None:
        prompt, answer = self._rng.choice(self._problems)
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, data = await self._post(COMPLETIONS, body)
        if status == 200 and not json.loads(data)["choices"][0]["text"]:
            self.wrong.append(f"no answer for {prompt}, which is {answer}")

    async def _sampled(self) -> None:
        rng = self._rng
        body: dict[str, Any] = {"prompt": "1" * rng.randrange(1, 600), "stream": rng.random() < 0.6}
        body |= {"max_tokens": rng.randrange(1, 200), "n": rng.choice((1, 1, 1, 2, 4))}
        more: list[dict[str, Any]] = [
            {"logprobs": rng.randrange(6)}, {"stop": ["7", "12", "999"]}, {"top_p": 0.8},
            {"presence_penalty": 0.5}, {"seed": 3}, {"bad_words": ["1", "22"]}, {"min_p": 0.1},
            {"logit_bias": {"50": -10}}, {"ignore_eos": True}, {"model": rng.choice(ADAPTERS)},
            {"structured_outputs": {"regex": "[0-9]+"}}, {"cache_salt": "a"},
            {"structured_outputs": {"choice": ["yes", "no"]}},
        ]  # fmt: skip
        for extra in rng.sample(more, rng.randrange(4)):
            body |= extra
        await self._post(COMPLETIONS, body)

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": "2+2=" * self._rng.randrange(1, 20)}]
        body = {"messages": messages, "max_tokens": 32, "stream": self._rng.random() < 0.5}
        await self._post(CHAT, body)

    async def _vectors(self) -> None:
        texts = ["1" * self._rng.randrange(1, 300) for _ in range(self._rng.randrange(1, 8))]
        if self._rng.random() < 0.5:
            await self._post("/v1/embeddings", {"input": texts})
        else:
            await self._post("/score", {"queries": "12", "documents": texts})

    async def _tokens(self) -> None:
        await self._post("/tokenize", {"prompt": "123" * self._rng.randrange(1, 500)})
        await self._post("/metrics", b"", "GET")

    async def _leave(self) -> None:
        """Leave in the middle of an answer."""
        body = {"prompt": "5" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        asked = asyncio.ensure_future(self._post(COMPLETIONS, body))
        await asyncio.sleep(self._rng.random() * 0.3)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        self.statuses["left"] += 1

    async def _killed(self) -> None:
        """Kill a client's process in the middle of an answer."""
        body = {"prompt": "5", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        address = self._server.address
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", KILLED, address.host, str(address.port), json.dumps(body),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.sleep(0.2 + self._rng.random() * 0.3)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
        self.statuses["killed"] += 1

    async def _odd(self) -> None:
        """Wrong types, and JSON that is cut."""
        rng = self._rng
        values: list[Any] = [
            None,
            True,
            -1,
            0,
            1e400,
            "x",
            "\ud800",
            [],
            [[]],
            {},
            [1],
            ["a"],
            9**30,
        ]
        names = (
            "prompt", "max_tokens", "temperature", "stop", "n", "stream", "logprobs", "logit_bias",
            "seed", "structured_outputs", "echo", "what", "min_tokens", "bad_words", "cache_salt",
            "priority", "allowed_token_ids", "prompt_logprobs", "model", "response_format",
        )  # fmt: skip
        body = {"prompt": "1+1=", "max_tokens": 2}
        body |= {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 4))}
        data = json.dumps(body).encode()
        await self._post(
            COMPLETIONS, data[: rng.randrange(len(data))] if rng.random() < 0.2 else data
        )

    async def _attack(self) -> None:
        name = self._rng.choice([*self._attacks])
        address = self._server.address
        found = await send(self._attacks[name], address.host, address.port)
        self.statuses[f"attack {found}"] += 1
        if found.isdigit() and int(found) not in EXPECTED:
            self.wrong.append(f"{name}: {found}")

    async def _adapter(self) -> None:
        """Load an adapter, or remove it."""
        name = self._rng.choice(ADAPTERS)
        body = {"lora_name": name, "lora_path": str(self._adapters / name)}
        which = self._rng.choice(("load", "unload"))
        await self._post(f"/v1/{which}_lora_adapter", body)

    async def _sleep(self) -> None:
        await self._post("/sleep?level=1&running=abort", b"")
        await asyncio.sleep(0.2)
        await self._post("/wake_up", b"")

    def reading(self) -> dict[str, Any]:
        """What the server uses, while nothing runs."""
        server = self._server
        return {
            "memory_mib": round(server.memory_mib(), 1),
            "files": server.num_files(),
            "threads": server.num_threads(),
            "statuses": dict(sorted(self.statuses.items())),
            "wrong": len(self.wrong),
        }


async def soak(server: Served, adapters: Path, options: argparse.Namespace) -> list[str]:
    """Ask until the time is over; returns what went wrong."""
    asked = Soak(server, adapters, random.Random(options.seed))
    end, readings = time.monotonic() + options.seconds, []
    while time.monotonic() < end and not server.has_ended:
        until = min(end, time.monotonic() + PERIOD)
        await asyncio.gather(*(asked.client(until) for _ in range(options.clients)))
        server.client.close()
        await asyncio.sleep(options.rest)
        if server.has_ended:
            break
        readings.append(asked.reading())
        print(json.dumps(readings[-1]), flush=True)
    wrong = asked.wrong
    if server.has_ended or "Traceback" in server.log:
        wrong.append(f"the log has: {server.log[-4000:]}")
    if len(readings) >= 5:
        first, last = readings[len(readings) // 5], readings[-1]
        if last["memory_mib"] - first["memory_mib"] > MIB_GROWN:
            wrong.append("the memory has grown")
        wrong += [
            f"there are more {name}"
            for name in ("files", "threads")
            if last[name] > first[name] + THREADS
        ]
    return wrong


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds before each line")
    parser.add_argument("--seed", type=int, default=0)
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:split])
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for seed, name in enumerate(ADAPTERS):
            write_adapter(place / name, seed)
        flags = (
            "--enable-lora", "--allow-lora-updates", "--sleep-endpoints", "--max-loras", "2",
            *own[split + 1 :],
        )  # fmt: skip
        with served(EMBEDDED_MODEL, place / "log", *flags) as server:
            wrong = asyncio.run(soak(server, place, options))
    for line in wrong[:50]:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
