"""How long ordinary streams wait while one client attacks the server.

    python benchmarks/attack.py [--seconds 8] [--streams 32] [--rest 5] [--rounds 1] [--cpus 0,1]
        [--only NAME ...] [-- SERVER OPTIONS]

`nanovllm serve` serves the embedded model, with the options after `--`. Ordinary clients stream
completions of 64 tokens, one after the other, while another process sends one of the requests in
`attacks.py` again and again. A line of JSON for each attack:

    sent, statuses      what the attacker sent, and what it was answered; "" is a closed connection
    longest_gap_ms      the longest time between two events of an ordinary stream
    first_token_ms      the longest time to an ordinary stream's first event
    tokens_per_second   of the ordinary streams
    failed              ordinary streams without an answer
    grown_mib           how much memory both processes have more than before, `--rest` seconds later
    memory_mib          what they have then

The first line is of a time without an attack.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attacks import COMPLETIONS, Attack, attacks
from served import Served, served

from nanovllm.bench.serve.response import Head
from nanovllm.embedded import EMBEDDED_MODEL

TOKENS = 64
NOTHING = "nothing"


class Times:
    """A receiver of an ordinary stream's events, with the times between them."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.first: float | None = None
        self.gap = 0.0
        self.status = 0

    def receive(self, now: float, head: Head, data: bytes) -> None:  # noqa: ARG002
        """Count an event."""
        self.status = head.status
        if self.first is None:
            self.first = now - self.last
        else:
            self.gap = max(self.gap, now - self.last)
        self.last = now


async def ordinary(server: Served, until: float) -> list[Times]:
    """Stream one completion after the other.

    Each of its tokens has text. Tokens without text, as special ones usually are, have no events,
    and the time between events would be that of several steps.
    """
    body = {
        "prompt": "12+34=",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "temperature": 0.0,
        "stream": True,
    }
    request = server.client.request("POST", COMPLETIONS, json.dumps(body).encode())
    done = []
    while time.perf_counter() < until:
        times = Times()
        with contextlib.suppress(Exception):  # counted by its status
            await server.client.send(request, times)
        done.append(times)
    return done


async def send(attack: Attack, host: str, port: int) -> str:
    """Send an attack once; returns the status of the answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for piece in attack.pieces():
            writer.write(piece)
            await writer.drain()
        if not attack.reads:
            await asyncio.sleep(attack.wait or 0.0)
            return "left"
        head = await asyncio.wait_for(reader.read(16), attack.wait)
        while await asyncio.wait_for(reader.read(1 << 20), attack.wait):
            pass
        return head[9:12].decode()
    except asyncio.TimeoutError:
        return "left"
    except OSError:  # closed while it was sent: the answer may have been received
        with contextlib.suppress(OSError):
            return (await reader.read(16))[9:12].decode()
        return ""
    finally:
        writer.transport.abort()


async def attack_for(name: str, host: str, port: int, seconds: float) -> dict[str, int]:
    """Send an attack again and again; returns how many answers had each status."""
    attack = attacks()[name]()
    end = time.monotonic() + seconds
    statuses: collections.Counter[str] = collections.Counter()

    async def one() -> None:
        while time.monotonic() < end:
            statuses[await send(attack, host, port)] += 1

    workers = [asyncio.ensure_future(one()) for _ in range(attack.at_once)]
    await asyncio.wait(workers, timeout=seconds)
    for worker in workers:
        worker.cancel()
    statuses["open"] += sum(not worker.done() for worker in workers)
    return dict(statuses)


def attacker(name: str, host: str, port: int, seconds: float, link: Connection) -> None:
    """The attacker's process. It yields the processor to others, as one far away would."""
    os.nice(15)
    link.send(asyncio.run(attack_for(name, host, port, seconds)))


async def measure(
    server: Served, name: str, seconds: float, streams: int, rest: float
) -> dict[str, Any]:
    """Attack a server, and measure what its ordinary clients see, and memory after a rest."""
    before = server.memory_mib()
    ours, theirs = multiprocessing.Pipe()
    host, port = server.address.host, server.address.port
    process = multiprocessing.Process(target=attacker, args=(name, host, port, seconds, theirs))
    if name != NOTHING:
        process.start()
    start = time.perf_counter()
    clients = (ordinary(server, start + seconds) for _ in range(streams))
    done = [times for one in await asyncio.gather(*clients) for times in one]
    passed = time.perf_counter() - start
    statuses = {}
    if name != NOTHING:
        statuses = await asyncio.to_thread(ours.recv)
        process.join()
    await asyncio.sleep(rest)
    answered = [times for times in done if times.status == 200 and times.first is not None]
    return {
        "attack": name,
        "sent": sum(statuses.values()),
        "statuses": statuses,
        "longest_gap_ms": round(1000 * max((times.gap for times in answered), default=0.0)),
        "first_token_ms": round(1000 * max((times.first or 0.0 for times in answered), default=0)),
        "tokens_per_second": round(TOKENS * len(answered) / passed),
        "failed": len(done) - len(answered),
        "grown_mib": round(server.memory_mib() - before, 1),
        "memory_mib": round(server.memory_mib(), 1),
    }


async def measure_all(server: Served, names: list[str], options: argparse.Namespace) -> None:
    """Print a line for each attack."""
    seconds, streams, rest = options.seconds, options.streams, options.rest
    await measure(server, NOTHING, min(2.0, seconds), streams, rest)  # makes what is made once
    for name in names:
        print(json.dumps(await measure(server, name, seconds, streams, rest)), flush=True)
        if server.has_ended:
            sys.exit(f"the server has ended: {server.log[-2000:]}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds until memory is read")
    parser.add_argument("--rounds", type=int, default=1, help="of all attacks, one after the other")
    parser.add_argument("--cpus", help="of the server; clients may use all")
    parser.add_argument("--only", nargs="*", default=[], help="parts of attacks' names")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:split])
    names = [
        name for name in attacks()
        if not options.only or any(part in name for part in options.only)
    ]  # fmt: skip
    multiprocessing.set_start_method("spawn")
    with (
        tempfile.TemporaryDirectory() as directory,
        served(
            EMBEDDED_MODEL, Path(directory) / "log", *own[split + 1 :], cpus=options.cpus
        ) as server,
    ):
        asyncio.run(measure_all(server, [NOTHING, *names] * options.rounds, options))


if __name__ == "__main__":
    main()
