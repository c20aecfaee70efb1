"""Ranks that are processes of one machine, as rank 0 starts and ends them and a worker joins them.

How they exchange tensors is the subclasses' matter: NCCL between GPUs, shared memory on the CPU.
"""

from collections.abc import Callable

from nanovllm.layers.ranks import Ranks


class ProcessRanks(Ranks):
    """One process of `size`.

    `place` tells the other processes where to join rank 0; they must inherit the files in `fds`.
    """

    def __init__(self, rank: int, size: int, place: int, fds: tuple[int, ...] = ()) -> None:
        super().__init__(rank, size)
        self.place = place
        self.fds = fds
        self.check: Callable[[], None] = lambda: None  # raises if another rank has ended

    def connect(self) -> None:
        """Meet the other ranks, when all have loaded."""

    def abort(self) -> None:
        """End the exchanges in flight, from any thread: a rank has ended."""

    def leave(self, together: bool) -> None:
        """Let go of the others: `together` with all of them, or whatever state they are in."""

    def close(self) -> None:
        """Free what the ranks met in. Their processes have ended, or never began."""
