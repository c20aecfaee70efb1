"""OtherRanks: what startup and the runner of rank 0 ask of the other ranks.

The base class is for an engine of one rank, which has no others. With several it is
`nanovllm.engine.ranks.workers.Workers`, which startup imports.
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
    """What every rank does with its own shard between two steps, such as changing weights.

    It can be pickled. Ranks exchange tensors in `run` only if all of them do, in the same order.
    What it returns is pickled, except on rank 0. The device's work is waited for, too, unless the
    command has a false `waits_for_device`: then the steps that follow come after it.
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
        """Make each load its part of the model, with what features add to it."""

    def connect(self) -> None:
        """Wait until each has loaded its part, and connect to them."""

    def step(self, inputs: StepInputs) -> AbstractContextManager[None]:  # noqa: ARG002
        """A block in which they compute the step, which rank 0 computes in it."""
        return nullcontext()

    def everywhere(self, command: Command, shard: Shard) -> list[Any]:
        """Run a command on all ranks, on rank 0 with `shard`. The results, rank 0's first.

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
        """End them. Decode graphs must be gone."""
