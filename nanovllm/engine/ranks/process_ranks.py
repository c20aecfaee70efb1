"""Ranks that are processes on one machine: what rank 0 and the workers need to manage them.

Subclasses exchange the tensors: through NCCL between GPUs, through shared memory on the CPU.
"""

from collections.abc import Callable

from nanovllm.layers.ranks import Ranks

Check = Callable[[], None]


def no_check() -> None:
    """Do nothing: rank 0 watches the ranks, and the others end with it."""


class ProcessRanks(Ranks):
    """One process of `size`.

    `address` is where the other processes join rank 0; they must inherit the files `fds`. `check`
    is called while this rank waits: it raises if another rank has ended.
    """

    def __init__(
        self, rank: int, size: int, address: int, fds: tuple[int, ...], check: Check
    ) -> None:
        super().__init__(rank, size)
        self.address = address
        self.fds = fds
        self.check = check

    def connect(self) -> None:
        """Connect to the other ranks. Called when all have loaded."""

    def abort(self) -> None:
        """Abort the exchanges in flight because a rank has ended. Called from any thread."""

    def leave(self, together: bool) -> None:
        """Disconnect: `together` with all ranks, or by this rank alone, in any state."""

    def close(self) -> None:
        """Free what the address refers to. The other processes have ended or never started."""
