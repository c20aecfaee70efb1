"""An engine's process with steps that compute nothing: for benchmarks/front.py."""

import random
import time
from typing import Any, NamedTuple

from nanovllm import engine_main
from nanovllm.engine.run.model_runner import ModelRunner
from nanovllm.engine.schedule.batch import Batch

VOCAB = 30_000
PREFILL_SECONDS = 2e-6  # a token


class IdleStep(NamedTuple):
    """A step that computes nothing, and ends at a time."""

    batch: Batch
    num_tokens: int
    end: float


class IdleRunner:
    """Stands in for a ModelRunner: waits as long as a device would compute, and draws tokens."""

    def __init__(self, step_us: int) -> None:
        self._step_seconds, self._free = step_us * 1e-6, 0.0
        self._rng = random.Random(0)
        self._token_ids = [self._rng.randrange(256, VOCAB) for _ in range(100_000)]

    def begin(self, batch: Batch) -> IdleStep:
        """Begin when the step before has ended."""
        number = sum(seq.num_scheduled_tokens for seq in batch.seqs)
        seconds = number * PREFILL_SECONDS if batch.is_prefill else self._step_seconds
        self._free = max(time.perf_counter(), self._free) + seconds
        return IdleStep(batch, number, self._free)

    def draw(self, step: IdleStep) -> IdleStep:
        """Nothing is left to do."""
        return step

    def wait(self, step: IdleStep) -> list[int]:
        """The step's tokens, at its end."""
        time.sleep(max(0.0, step.end - time.perf_counter()))
        number, start = len(step.batch.sampling_seqs), self._rng.randrange(90_000)
        return self._token_ids[start : start + number]


def main(step_us: int, caller: int, line: int, connection: int) -> None:
    """Serve, as `engine_main.main` does."""
    idle = IdleRunner(step_us)
    for name in ("begin", "draw", "wait"):
        setattr(ModelRunner, name, _method(getattr(idle, name)))
    engine_main.main(caller, line, connection)


def _method(function: Any) -> Any:
    return lambda _, value: function(value)
