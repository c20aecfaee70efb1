"""Ranks that are processes of one machine: NCCL between GPUs, gloo on the CPU.

The process group is the engine's own: PyTorch's default group, which is the caller's to use, is not
touched, and several engines do not meet. Ports are the system's choice, on the loopback device but
for NCCL's, whose device NCCL_SOCKET_IFNAME names.
"""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nanovllm.engine.errors import ExchangeError, RankError
from nanovllm.utils.ranks import Ranks

dist: Any = torch.distributed  # whose bindings have no types

LOOPBACK = "127.0.0.1"
MEETING = timedelta(seconds=5)  # ranks meet when all have loaded: that takes milliseconds
SPIN_SECONDS = 2e-3  # how long to look for an exchange's end before sleeping
NAP_SECONDS = 1e-4
PATIENCE = timedelta(days=7)  # a rank that is stopped may go on; of one that died others tell


class ProcessRanks(Ranks):
    """One process of `size`, on a device of its own. All of them `connect` at one time."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.check: Callable[[], None] = lambda: None  # raises if another rank has ended
        self.is_stuck = False  # in an exchange that never ends
        self._group: Any = None
        self._device = torch.device("cpu")
        self._sum, self._least = _options("AllreduceOptions"), _options("AllreduceOptions")
        self._least.reduceOp = dist.ReduceOp.MIN
        self._gather = _options("GatherOptions")
        self._gather.rootRank = 0

    def connect(self, device: torch.device, store: Any) -> None:
        """Meet the other ranks. NCCL waits for ever for one that has died meanwhile."""
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        try:
            group = make(self.rank, self.size, store)
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
        x = torch.zeros(1, device=device)
        try:
            self._exchange(group.allreduce, [x], self._sum)  # at the first exchange NCCL connects
        except RankError:
            _keep(group)
            raise
        x.item()
        self._group = group  # before, it could not be aborted

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange(self._group.allreduce, [x], self._sum)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._exchange(self._group.gather, [parts] if parts else [], [x], self._gather)
        return torch.cat(parts, dim=-1) if parts else x

    def least(self, number: int) -> int:
        x = torch.tensor([number], device=self._device)
        self._exchange(self._group.allreduce, [x], self._least)
        return int(x)

    def abort(self) -> None:
        """End the exchanges in flight, from any thread: gloo's end with the others' processes.

        NCCL first ends those in flight, and then waits until no CUDA graph holds any.
        """
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()

    def close(self, together: bool) -> None:
        """Let go of the others: `together` with all of them, or whatever state they are in."""
        if self._group is not None and self._device.type == "cuda":  # gloo has nothing to say
            _within(MEETING, self._group.shutdown if together else self._group.abort)
        if self.is_stuck:
            _keep(self._group)
        self._group = None

    def _exchange(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            work = method(*arguments)
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
        if work is None:  # NCCL's is in order on the stream
            return
        self._await(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error

    def _await(self, work: Any) -> None:
        """Wait for gloo's work, and see that all ranks live.

        gloo tells of one that has died, but not always: an exchange that begins in that very moment
        may wait for ever.
        """
        start = time.perf_counter()
        while not work.is_completed():
            if time.perf_counter() - start < SPIN_SECONDS:
                os.sched_yield()
                continue
            time.sleep(NAP_SECONDS)
            try:
                self.check()
            except RankError:
                if self._ends(work):
                    return
                self.is_stuck = True
                raise

    @staticmethod
    def _ends(work: Any) -> bool:
        for _ in range(100):
            if work.is_completed():
                return True
            time.sleep(0.01)
        return False


def _keep(group: Any) -> None:
    """Keep a group for ever: its end would wait for that of an exchange which has none."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def open_store(size: int) -> Any:
    """Where the ranks find each other; the port is bound from the moment that it is chosen."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, size, is_master=True, timeout=MEETING, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def find_store(port: int, size: int) -> Any:
    """Rank 0's store, seen from another rank."""
    return dist.TCPStore(LOOPBACK, port, size, is_master=False, timeout=MEETING)


def _within(time: timedelta, call: Callable[[], None]) -> None:
    """Call, and wait for it no longer than that."""
    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # some Pythons start no thread while they end
        call()
    else:
        thread.join(time.total_seconds())


def _options(name: str) -> Any:
    options = getattr(dist, name)()
    options.timeout = PATIENCE
    if hasattr(options, "asyncOp"):
        options.asyncOp = False  # NCCL stays on the stream that we compute on
    return options


def _gloo(rank: int, size: int, store: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = MEETING
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(rank: int, size: int, store: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, rank, size, options)
