"""The ring: every byte arrives once, in order, for any lengths and any number of readers."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from waiting import FOREVER, LIMIT, wait_until

from nanovllm.engine.ranks import channel
from nanovllm.engine.ranks.channel import Reader, Writer
from nanovllm.engine.run.device_table import TableLayout
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.step_inputs import step_inputs
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring so small that messages wrap around it, and some exceed it."""
    monkeypatch.setattr(channel, "CAPACITY", 256)


def no_check() -> None:
    pass


@contextmanager
def connected(num_readers: int) -> Iterator[tuple[Writer, list[Reader]]]:
    writer = Writer(num_readers, no_check)
    readers = [Reader(writer.fd, writer.bells[i][0], i, num_readers) for i in range(num_readers)]
    yield writer, readers
    for reader in readers:
        del reader.read, reader.asleep
        reader.ring.close()
    writer.close()


def pattern(length: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(length)


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 100, 247, 248, 249, 256, 600, 2000]), max_size=12),
    num_readers=st.integers(1, 3),
)
def test_every_reader_gets_every_message_once(lengths: list[int], num_readers: int) -> None:
    """248 bytes and their length just fill the ring; longer messages are sent in pieces."""
    messages = [pattern(length, seed) for seed, length in enumerate(lengths)]
    with connected(num_readers) as (writer, readers), ThreadPoolExecutor(num_readers) as pool:
        got = [pool.submit(lambda r: [bytes(r.receive()) for _ in messages], r) for r in readers]
        for message in messages:
            writer.send(message)
        for future in got:
            assert future.result(timeout=LIMIT) == messages


def test_the_writer_waits_for_the_slowest_reader() -> None:
    """Bytes that it has not read must not be overwritten."""
    with connected(2) as (writer, (fast, slow)):
        writer.send(pattern(200, 0))
        sender = threading.Thread(target=writer.send, args=(pattern(200, 1),))
        sender.start()
        assert fast.receive() == pattern(200, 0)
        sender.join(0.1)
        assert sender.is_alive(), "it has overwritten what one reader has not read"
        assert slow.receive() == pattern(200, 0)
        assert fast.receive() == slow.receive() == pattern(200, 1)
        sender.join(LIMIT)
        assert not sender.is_alive()


def test_a_writer_that_waits_checks_for_dead_readers() -> None:
    def check() -> None:
        raise KeyError("dead")

    with connected(1) as (writer, _):
        writer.check = check
        writer.send(bytes(100))
        with pytest.raises(KeyError, match="dead"):
            writer.send(bytes(1000))


def test_a_sleeping_reader_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "NAP_SECONDS", FOREVER)
    with connected(1) as (writer, (reader,)), ThreadPoolExecutor(1) as pool:
        for number in range(20):
            got = pool.submit(reader.receive)
            wait_until("the reader does not sleep", lambda: reader.asleep[0])
            writer.send(bytes([number]))
            assert got.result(timeout=LIMIT) == bytes([number])


def test_a_reader_wakes_up_without_its_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory order may let both sides miss each other; then the nap ends by itself."""
    with connected(1) as (writer, (reader,)), ThreadPoolExecutor(1) as pool:
        got = pool.submit(reader.receive)
        wait_until("the reader does not sleep", lambda: reader.asleep[0])
        monkeypatch.setattr(writer, "_wake", no_check)
        writer.send(b"x")
        assert got.result(timeout=LIMIT) == b"x"


def test_a_full_bell_does_not_block_the_writer() -> None:
    with connected(1) as (writer, (reader,)):
        reader.ring.asleep[0] = 1
        for _ in range(70_000):  # a pipe holds 64 KiB
            writer._wake()


SLEEPER = """
import sys, time
from nanovllm.engine.ranks.channel import Ring
ring = Ring(int(sys.argv[1]), 1)
until = time.time() + 1.0
while time.time() < until:
    ring.asleep[0] = 1
    ring.asleep[0] = 0
"""


def test_readers_that_fall_asleep_all_the_time_do_not_stop_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the other process has the real size
    writer = Writer(1, no_check)
    command = [sys.executable, "-c", SLEEPER, str(writer.fd)]
    with subprocess.Popen(command, pass_fds=[writer.fd]) as process:
        while process.poll() is None:
            writer._wake()
    assert process.returncode == 0
    writer.close()


def test_waiting_takes_little_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader polls for a moment; then it looks once after each nap."""
    done: list[float | str] = []
    with connected(1) as (writer, (reader,)), ThreadPoolExecutor(1) as pool:
        poll = reader._poll.poll

        def nap(milliseconds: float) -> Any:
            done.append(milliseconds)
            return poll(milliseconds)

        monkeypatch.setattr(reader, "_poll", SimpleNamespace(poll=nap))
        monkeypatch.setattr(os, "sched_yield", lambda: done.append("look"))
        got = pool.submit(reader.receive)
        naps = wait_until("the reader never sleeps", lambda: [n for n in done if n != "look"][3:])
        first = next(index for index, one in enumerate(done) if one != "look")
        assert done[first : first + 6] == [naps[0], "look"] * 3
        assert naps[0] == channel.NAP_SECONDS * 1e3 >= 10
        writer.send(b"x")
        got.result(timeout=LIMIT)


def test_no_file_or_descriptor_is_left_behind() -> None:
    def there() -> list[list[str]]:
        return [sorted(os.listdir(path)) for path in ("/dev/shm", "/proc/self/fd")]  # noqa: PTH208

    before = there()
    with connected(3):
        assert there()[0] == before[0]
    assert there() == before


READER = """
import sys, pickle, xxhash
from nanovllm.engine.ranks.channel import Reader
fd, bell, index, num_readers = map(int, sys.argv[1:])
reader = Reader(fd, bell, index, num_readers)
inputs, last = (pickle.loads(reader.receive()) for _ in range(2))
print(xxhash.xxh64_hexdigest(inputs.input_ids), len(inputs.input_ids), last)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_prompts", "length"), [(1, 262_144), (512, 8192)])
def test_long_prompts_arrive_whole(
    num_prompts: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between processes, in a ring of the real size: up to 25 times that size."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    seqs = []
    for index in range(num_prompts):
        seq = Sequence(rng.integers(0, 151_936, length).tolist(), SamplingParams())
        seq.block_tables = [list(range(index, index + length // 16))]
        seq.num_scheduled_tokens = length
        seqs.append(seq)
    ledger = Ledger(TableLayout(num_prompts, length // 16, 16))
    prefill = step_inputs(Batch(seqs, is_prefill=True), 16, ledger, []).prefill
    assert prefill is not None
    writer = Writer(2, no_check)
    processes = []
    for index in range(2):
        fds = (writer.fd, writer.bells[index][0])
        arguments = [str(n) for n in (*fds, index, 2)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", READER, *arguments],
                pass_fds=fds, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    message = pickle.dumps(prefill, protocol=5)
    assert num_prompts == 1 or len(message) > 20 * channel.CAPACITY
    writer.send(message)
    writer.send(pickle.dumps("end"))
    for process in processes:
        out, _ = process.communicate(timeout=LIMIT)
        digest = xxhash.xxh64_hexdigest(prefill.input_ids)
        assert out == f"{digest} {num_prompts * length} end\n"
    writer.close()
