"""Workers: starts, drives, watches and ends the processes of the other ranks.

A thread watches their life lines. When a process ends, all are ended, and the caller gets one
exception that names the first failure.
"""

import contextlib
import dataclasses
import json
import math
import os
import pickle
import selectors
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.errors import ExchangeError, RankError
from nanovllm.engine.ranks.answers import Answers, attempt, results
from nanovllm.engine.ranks.channel import Writer
from nanovllm.engine.ranks.codec import encode, pack
from nanovllm.engine.ranks.join import join
from nanovllm.engine.ranks.life_line import ending, start_process
from nanovllm.engine.ranks.process_ranks import ProcessRanks
from nanovllm.engine.run.other_ranks import Command, OtherRanks
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.start.parts import ShardParts
from nanovllm.models.config import ModelConfig
from nanovllm.utils.interrupts import holding_interrupts

# One rank's death makes others fail: collect reports this long, then blame the earliest.
SETTLE_SECONDS = 0.2
# How long rank 0 waits, after a failed exchange, for the rank to blame. A death is known at once.
BLAME_SECONDS = 30.0
END_SECONDS = 5.0  # for the processes to end by themselves
MIN_ROOM = 64  # bytes in the ring, for the last message


@dataclasses.dataclass(frozen=True)
class Failure:
    """The exception that ended a rank."""

    is_exchange: bool  # an exchange failed: another rank is to blame
    time: float
    error: str
    traceback: str


class Worker:
    """One process, and rank 0's end of its life line."""

    def __init__(self, rank: int, ranks: ProcessRanks, writer: Writer) -> None:
        self.name = f"rank {rank} of {ranks.size}"
        self.ready = False
        self.report: Failure | None = None
        self.line, its_end = socket.socketpair()
        self.answers, its_answers = socket.socketpair()  # of commands
        self._buffer = b""
        with its_end, its_answers:
            bell = writer.bells[rank - 1][0]
            fds = (writer.fd, bell, its_end.fileno(), its_answers.fileno())
            arguments = (os.getpid(), rank, ranks.size, *fds, ranks.address)
            self.process = start_process(
                "nanovllm.engine.ranks.worker", arguments, fds=(*fds, *ranks.fds)
            )

    def read_messages(self) -> bool:
        """Read the process's messages; False when its line is cut."""
        try:
            heard = self.line.recv(1 << 16)
        except ConnectionError:
            heard = b""
        *messages, self._buffer = (self._buffer + heard).split(b"\n")
        for message in map(json.loads, messages):
            if "ready" in message:
                self.ready = True
            else:
                self.report = Failure(**message)
        return bool(heard)

    def ending(self) -> str:
        """How the process ended, in one line of text."""
        if self.report is not None:
            return f"raised {self.report.error}"
        return ending(self.process)

    def cut(self) -> None:
        """Cut the line, also where others inherited it. This ends the process."""
        for end in (self.line, self.answers):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Workers(OtherRanks):
    """All ranks except rank 0, which is the caller's process."""

    ranks: ProcessRanks

    def __init__(self, size: int, device: str, one_order: bool = False) -> None:
        super().__init__(join(0, size, device, check=self.check, one_order=one_order))
        self._traceback = ""
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.ranks.close)
            self._writer = Writer(size - 1, self.check)
            stack.callback(self._writer.close)
            stack.callback(self._end)
            for rank in range(1, size):
                self._workers.append(Worker(rank, self.ranks, self._writer))
            stack.callback(self._disconnect)
            self._quit, self._quit_heard = socket.socketpair()
            self._watcher = threading.Thread(target=self._watch, name="nanovllm", daemon=True)
            self._watcher.start()
            stack.callback(self._stop_watching)
            self._resources = stack.pop_all()  # from here on close() closes them

    def start(
        self, config: Config, model_config: ModelConfig, path: Path, parts: ShardParts
    ) -> None:
        self._writer.send(pickle.dumps((config, model_config, path, self.num_threads, parts)))

    def connect(self) -> None:
        self._wait_for(lambda: all(worker.ready for worker in self._workers))
        self._writer.send(b"connect")
        self.ranks.connect()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or condition())
        self.check()

    @contextlib.contextmanager
    def step(self, inputs: StepInputs) -> Iterator[None]:
        """Send the step that rank 0 computes in the block.

        Ctrl-C waits for the block's end: ranks that do not make the same exchanges cannot go on.
        """
        with self.waiting():
            self._writer.send(encode(inputs))
            yield

    def everywhere(self, command: Command, shard: Shard) -> list[Any]:
        """All ranks' results, rank 0's first; a rank's error has a note that names the rank.

        After an error the engine can go on, unless other ranks wait in an exchange.
        """
        self.check()
        message = pack(command)
        with self.waiting():
            self._writer.send(message)
            links = [(worker.name, worker.answers) for worker in self._workers]
            answers = Answers(links, self._fail)
            outcomes = answers.outcomes(attempt(command, shard))
        return results(outcomes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        with holding_interrupts(), self.together():
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, ExchangeError | RankError):
                traceback.clear_frames(error.__traceback__)  # frames refer to group and tensors
                with self._changed:
                    self._changed.wait_for(lambda: self.failure, BLAME_SECONDS)
                self.check()
            self.failure = self.failure or f"rank 0 raised {type(error).__name__} in a step"
            raise
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            details = f"\n\n{self._traceback}" if self._traceback else ""
            raise RankError(f"{self.failure}{details}") from None

    def close(self) -> None:
        """End the processes and free what they used. Idempotent. Decode graphs must be gone.

        Not for a forked child of the caller: it has the caller's sockets.
        """
        self._resources.close()

    def _watch(self) -> None:
        """Listen until `close`, or until a rank has ended; then end the others."""
        try:
            if (worker := self._first_to_end()) is None:
                return
            failure = f"{worker.name} {worker.ending()}"
            self._traceback = worker.report.traceback if worker.report else ""
        except BaseException as error:
            failure = f"watching the ranks raised {error!r}"
        self._fail(failure)

    def _fail(self, failure: str) -> None:
        """Record why the engine cannot go on, and end all ranks. Called from any thread."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()
        for worker in self._workers:
            worker.process.kill()
        self.ranks.abort()

    def _first_to_end(self) -> Worker | None:
        """Listen to all life lines, until `close` or until a rank has ended."""
        settled: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._quit_heard, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.line, selectors.EVENT_READ, worker)
            cut: list[Worker] = []
            while settled is None or time.monotonic() < settled:
                timeout = None if settled is None else max(0.0, settled - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.data is None:
                        return None
                    if not key.data.read_messages():
                        selector.unregister(key.fileobj)
                        cut.append(key.data)
                with self._changed:
                    self._changed.notify_all()
                if settled is None and (cut or any(w.report for w in self._workers)):
                    settled = time.monotonic() + SETTLE_SECONDS
        return self._who_was_first(cut)

    def _who_was_first(self, cut: list[Worker]) -> Worker:
        """The worker to blame: the first that raised, or else one that ended and reported nothing.

        A failed exchange counts last: another rank caused it.
        """
        reported = [(w.report.is_exchange, w.report.time, w) for w in self._workers if w.report]
        silent = [(False, math.inf, w) for w in cut if not w.report]
        return min(reported + silent, key=lambda entry: entry[:2])[2]

    def _disconnect(self) -> None:
        """Disconnect from the other ranks; send the end if they still read."""
        together = self.failure is None and self._writer.room > MIN_ROOM
        if together:
            self._writer.send(b"")  # the end
        self.ranks.leave(together)

    def _end(self) -> None:
        """Cut all lines, and kill the processes that do not end."""
        for worker in self._workers:
            worker.cut()
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def _stop_watching(self) -> None:
        self._quit.shutdown(socket.SHUT_RDWR)
        self._quit.close()
        if threading.current_thread() is not self._watcher:  # collection may run in any thread
            self._watcher.join(END_SECONDS)
        self._quit_heard.close()
