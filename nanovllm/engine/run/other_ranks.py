"""OtherRanks: what startup and rank 0's runner ask of the other ranks.

The base class is for an engine of one rank. With several ranks, startup imports the subclass
`nanovllm.engine.ranks.workers.Workers`.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from nanovllm.config import Config
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.start.parts import ShardParts
from nanovllm.engine.start.placement import threads_of_rank
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig


class Command(Protocol):
    """A task that every rank does with its own shard between two steps, such as changing weights.

    Commands are pickled. Ranks exchange tensors in `run` only if all of them do, in the same order.
    The result is pickled, except on rank 0. After `run` the rank waits for its device, unless
    `waits_for_device` is false: then later steps are only queued after the command's work.
    """

    def run(self, shard: Shard) -> Any:
        """Do this rank's part, and return its result."""


def run_command(command: Command, shard: Shard) -> Any:
    """Run a rank's part of a command, and wait for its device unless the command does not."""
    with shard.computing():
        value = command.run(shard)
        if getattr(command, "waits_for_device", True):
            shard.synchronize()
    return value


class OtherRanks:
    """All ranks except rank 0. `ranks` is how rank 0 exchanges tensors with them."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.num_threads = threads_of_rank(ranks.size)
        self.failure: str | None = None  # why the engine cannot go on, in a line

    def start(
        self, config: Config, model_config: ModelConfig, path: Path, parts: ShardParts
    ) -> None:
        """Let each rank load its part of the model, with the parts that features add."""

    def connect(self) -> None:
        """Wait until each rank has loaded its part, and connect to all."""

    def step(self, inputs: StepInputs) -> AbstractContextManager[None]:  # noqa: ARG002
        """A block in which rank 0 computes the step; the other ranks compute it, too."""
        return nullcontext()

    def everywhere(self, command: Command, shard: Shard) -> list[Any]:
        """Run a command on all ranks, on rank 0 with `shard`. Returns the results, rank 0's first.

        What a rank raises is raised here.
        """
        return [run_command(command, shard)]

    def together(self) -> AbstractContextManager[None]:
        """A block that all ranks take part in. If it raises, the ranks cannot go on together."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which rank 0 waits for the ranks' results; Ctrl-C waits for its end."""
        return nullcontext()

    def check(self) -> None:
        """Raise RankError if a rank has ended."""

    def close(self) -> None:
        """End the ranks. Decode graphs must be freed before."""
