"""Ranks that are processes of one machine: NCCL between GPUs, gloo on the CPU.

The process group is the engine's own: PyTorch's default group, which is the caller's to use, is not
touched, and several engines do not meet. Ports are the system's choice, on the loopback device but
for NCCL's, whose device NCCL_SOCKET_IFNAME names.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nanovllm.engine.errors import ExchangeError
from nanovllm.utils.ranks import Ranks

dist: Any = torch.distributed  # whose bindings have no types

LOOPBACK = "127.0.0.1"
MEETING = timedelta(seconds=5)  # ranks meet when all have loaded: that takes milliseconds
PATIENCE = timedelta(days=7)  # a rank that is stopped may go on; of one that died others tell


class ProcessRanks(Ranks):
    """One process of `size`, on a device of its own. All of them `connect` at one time."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
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
        self._exchange(group.allreduce, [x], self._sum)  # at the first exchange NCCL connects
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
        self._group = None

    @staticmethod
    def _exchange(method: Callable[..., Any], *arguments: Any) -> None:
        try:
            work = method(*arguments)
            if work is not None:  # NCCL's is in order on the stream
                work.wait()
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error


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
