"""Ranks on GPUs, which exchange tensors through NCCL.

The process group is the engine's own: PyTorch's default group, which is the caller's to use, is not
touched, and several engines do not meet. Ports are the system's choice, on the loopback device but
for NCCL's, whose device NCCL_SOCKET_IFNAME names.
"""

import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nanovllm.engine.ranks.errors import ExchangeError
from nanovllm.engine.ranks.process_ranks import ProcessRanks

dist: Any = torch.distributed  # whose bindings have no types

LOOPBACK = "127.0.0.1"
MEETING = timedelta(seconds=5)  # ranks meet when all have loaded: that takes milliseconds
CHECK_SECONDS = 0.01  # how often rank 0 sees, while they meet, that all live
PATIENCE = timedelta(days=7)  # a rank that is stopped may go on; of one that died others tell


class NcclRanks(ProcessRanks):
    """One process of `size`, on a GPU of its own. All of them `connect` at one time.

    `place` is the port of the store in which they find each other.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, place: int | None = None
    ) -> None:
        self._store: Any = None
        if place is None:
            self._store = open_store(size)
            place = self._store.port
        super().__init__(rank, size, place)
        self._group: Any = None
        self._device = device
        self._sum, self._least = _options("AllreduceOptions"), _options("AllreduceOptions")
        self._least.reduceOp = dist.ReduceOp.MIN
        self._first = _options("BroadcastOptions")  # from rank 0, as it is made
        self._gather = _options("GatherOptions")
        self._gather.rootRank = 0

    def connect(self) -> None:
        """Meet the other ranks. NCCL waits for ever for one that has died meanwhile.

        Rank 0 meets them in a thread, which it gives up then: its waiting cannot be interrupted.
        """
        if self.rank > 0:
            self._store = find_store(self.place, self.size)
            self._meet()
            return
        meeting: Future[None] = Future()

        def meet() -> None:
            try:
                self._meet()
                meeting.set_result(None)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # nobody may be there to do it
                error.__cause__ = error.__context__ = None
                meeting.set_exception(error)

        threading.Thread(target=meet, name="nanovllm-meet", daemon=True).start()
        while not meeting.done():
            wait([meeting], CHECK_SECONDS)
            self.check()
        meeting.result()

    def _meet(self) -> None:
        try:
            group = _nccl(self.rank, self.size, self._store)
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
        x = torch.zeros(1, device=self._device)
        self._exchange(group.allreduce, [x], self._sum)  # at the first exchange NCCL connects
        x.item()
        self._group = group  # before, it could not be aborted

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange(self._group.allreduce, [x], self._sum)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange(self._group.broadcast, [x], self._first)
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
        """End the exchanges in flight, and then wait until no CUDA graph holds any."""
        if self._group is not None:
            self._group.abort()

    def leave(self, together: bool) -> None:
        if self._group is not None:
            _within(MEETING, self._group.shutdown if together else self._group.abort)
        self._group = None

    def close(self) -> None:
        self._store = None

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


def _nccl(rank: int, size: int, store: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, rank, size, options)
