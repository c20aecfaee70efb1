"""Ranks on GPUs, which exchange tensors through NCCL, and sum few rows with our own kernels.

Each engine has its own process group: PyTorch's default group is left to the caller, and several
engines do not interfere. The system chooses the ports. They are on the loopback device, except
NCCL's own ports, which are on the device that NCCL_SOCKET_IFNAME names.
"""

import os
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d
import torch.nn.functional as F

from nanovllm.engine.errors import ExchangeError
from nanovllm.engine.ranks.process_ranks import Check, ProcessRanks, no_check
from nanovllm.kernels.plain.all_reduce import all_reduce

if TYPE_CHECKING:
    from nanovllm.engine.ranks.peers import Peers
    from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels

dist: Any = torch.distributed  # the bindings have no types

LOOPBACK = "127.0.0.1"
# Ranks connect when all have loaded: usually in milliseconds, but a busy machine may need more.
CONNECT_TIMEOUT = timedelta(minutes=2)
LEAVE_TIMEOUT = timedelta(seconds=5)  # for NCCL to end; after that it is abandoned
CHECK_SECONDS = 0.01  # between rank 0's checks that all ranks live, while they connect
# A stopped process may continue. A dead one is noticed by its life line, not by this timeout.
EXCHANGE_TIMEOUT = timedelta(days=7)


class NcclRanks(ProcessRanks):
    """One process of `size`, with its own GPU. All of them call `connect` together.

    `address` is the port of the store through which they find each other. With `one_order`, numbers
    are added up in the order of ranks and rounded once, however many rows there are.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, address: int | None = None,
        check: Check = no_check, one_order: bool = False,
    ) -> None:  # fmt: skip
        self._store: Any = None
        if address is None:
            self._store = open_store(size)
            address = self._store.port
        super().__init__(rank, size, address, (), check)
        self._group: Any = None
        self._device, self._one_order = device, one_order
        self._sum, self._minimum = _options("AllreduceOptions"), _options("AllreduceOptions")
        self._minimum.reduceOp = dist.ReduceOp.MIN
        self._broadcast = _options("BroadcastOptions")  # from rank 0 by default
        self._gather = _options("GatherOptions")
        self._gather.rootRank = 0
        self._to_all, self._gather_all = _options("AllToAllOptions"), _options("AllgatherOptions")
        self._peers: Peers | None = None

    def connect(self) -> None:
        """Connect to the other ranks. NCCL would wait forever for a rank that dies meanwhile.

        So rank 0 connects in a thread, and abandons the thread if a rank dies: NCCL's wait cannot
        be interrupted.
        """
        if self.rank > 0:
            self._store = find_store(self.address, self.size)
            self._connect()
            return
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                self._connect()
                connected.set_result(None)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # here: this thread may be abandoned
                error.__cause__ = error.__context__ = None
                connected.set_exception(error)

        threading.Thread(target=connect, name="nanovllm-connect", daemon=True).start()
        while not connected.done():
            wait([connected], CHECK_SECONDS)
            self.check()
        connected.result()

    def _connect(self) -> None:
        try:
            group = _nccl(self.rank, self.size, self._store)
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
        x = torch.zeros(1, device=self._device)
        self._exchange(group.allreduce, [x], self._sum)  # NCCL connects in the first exchange
        x.item()
        self._group = group  # from now on it can be aborted

    def connect_peers(self, kind: "type[PeerKernels] | None") -> None:
        if kind is None or os.environ.get("NCCL_P2P_DISABLE") == "1":
            return
        from nanovllm.engine.ranks.peers import Peers, connect_peers

        self._peers = peers = Peers(self.rank, self.size, self._device)
        self.peer_kernels = connect_peers(self, peers, kind)
        if self.peer_kernels is None:
            peers.unmap()
            self.minimum(0)  # all ranks have unmapped the others' memory
            peers.close()
            self._peers = None

    def few(self, num_rows: int, like: torch.Tensor) -> "PeerKernels | None":
        """None with `one_order`: fused with a norm, sums of few rows would be rounded once less."""
        return None if self._one_order else super().few(num_rows, like)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if kernels := super().few(len(x), x):
            return kernels.all_reduce(x)
        if self._one_order:
            return self._add_in_order(x)
        self._exchange(self._group.allreduce, [x], self._sum)
        return x

    def _add_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The sum that `PeerKernels` computes of few rows. Each rank adds up one part of it.

        NCCL chooses its order by the size of x.
        """
        if not x.numel():
            return x
        numbers = x.reshape(-1)
        if missing := -len(numbers) % self.size:
            numbers = F.pad(numbers, (0, missing))
        parts = torch.empty_like(numbers)
        self._exchange(self._group.alltoall_base, parts, numbers, [], [], self._to_all)
        total = all_reduce([*parts.view(self.size, -1)])
        self._exchange(self._group._allgather_base, numbers, total, self._gather_all)
        return numbers[: x.numel()].view(x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange(self._group.broadcast, [x], self._broadcast)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._exchange(self._group.gather, [parts] if parts else [], [x], self._gather)
        return torch.cat(parts, dim=-1) if parts else x

    def minimum(self, number: int) -> int:
        x = torch.tensor([number], device=self._device)
        self._exchange(self._group.allreduce, [x], self._minimum)
        return int(x)

    def abort(self) -> None:
        """Abort the exchanges in flight, and wait until no CUDA graph holds any."""
        if self._peers is not None:
            self._peers.end()
        if self._group is not None:
            self._group.abort()

    def leave(self, together: bool) -> None:
        if self._peers is not None and not together:
            self._peers.end()
        if self._group is not None:
            _call_within(LEAVE_TIMEOUT, self._group.shutdown if together else self._group.abort)
        self._group = None

    def close(self) -> None:
        self._store = None
        if self._peers is not None:
            self._peers.close()

    @staticmethod
    def _exchange(method: Callable[..., Any], *arguments: Any) -> None:
        try:
            work = method(*arguments)
            if work is not None:  # NCCL's work is ordered on the stream
                work.wait()
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error


def open_store(size: int) -> Any:
    """Open the store of rank 0. Its port is bound as soon as it is chosen."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, size, is_master=True, timeout=CONNECT_TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def find_store(port: int, size: int) -> Any:
    """Connect to rank 0's store from another rank."""
    return dist.TCPStore(LOOPBACK, port, size, is_master=False, timeout=CONNECT_TIMEOUT)


def _call_within(timeout: timedelta, call: Callable[[], None]) -> None:
    """Call in a thread, and wait at most `timeout` for it to return."""
    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # some Python versions start no thread while they exit
        call()
    else:
        thread.join(timeout.total_seconds())


def _options(name: str) -> Any:
    options = getattr(dist.distributed_c10d, name)()
    options.timeout = EXCHANGE_TIMEOUT
    if hasattr(options, "asyncOp"):
        options.asyncOp = False  # NCCL uses the current stream
    return options


def _nccl(rank: int, size: int, store: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = EXCHANGE_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
