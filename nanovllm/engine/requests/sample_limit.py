"""SampleLimit: bounds how many samples of a request run while other requests run or wait."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.schedule.scheduler import Scheduler

PATIENCE = 64  # steps until a request counts as alone: clients may send their next requests soon
RUNNING = SequenceStatus.RUNNING  # looked up once: there may be hundreds of samples in a step


class SampleLimit:
    """Gives the samples of one request at most `share` places while others run or wait.

    A request that is alone has all places; after others have ended, only `PATIENCE` steps later.
    Requests that all have such limits divide the places evenly. Requests with higher priority
    numbers do not count: they wait for this one in any case. A request has one place at least, so
    its first sample in order never waits for the others.

    `most` is how many samples may have places in this step. It is found when the first of them asks
    for its share of the step: `admits`.
    """

    def __init__(self, num_places: int, share: int, priority: int = 0) -> None:
        self.most = self._share = share
        self._num_places, self._priority = num_places, priority
        self._prompts: list[Sequence] = []  # of the step; each step has a list of its own
        self._num_counted = self._num_running = 0
        self._num_alone = PATIENCE  # steps in a row

    def admits(
        self,
        seq: Sequence,
        prompts: list[Sequence],
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
    ) -> bool:
        """Whether a sample may compute tokens in the step: it runs already, or may begin."""
        if prompts is not self._prompts:
            self._prompts, self._num_counted = prompts, len(prompts)
            self._count(running, waiting)
        elif len(prompts) > self._num_counted:
            self._num_running += sum(map(self._is_own, prompts[self._num_counted :]))
            self._num_counted = len(prompts)
        return self._num_running < self.most or seq.status is RUNNING

    def give_places(self, scheduler: "Scheduler") -> None:
        """Preempt the last samples above the limit if another request waits."""
        running, waiting = scheduler.running, scheduler.waiting
        if all(map(self._is_own, waiting)):
            return
        self._count(running, waiting)
        while self._num_running > self.most and self._is_own(running[-1]):
            self._num_running -= not running[-1].ends_in_flight
            scheduler.preempt()

    def _count(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Count the running samples, and find out how many may run."""
        staying = [seq for seq in running if not seq.ends_in_flight]
        self._num_running = sum(map(self._is_own, staying))
        counted = (seq for seq in (*staying, *waiting) if seq.order[0] <= self._priority)
        others = {seq.parts.samples for seq in counted} - {self}
        self._num_alone = 0 if others else self._num_alone + 1
        is_bounded = None in others or 0 < self._num_alone <= PATIENCE
        divided = 0 if is_bounded else self._num_places // (1 + len(others))
        self.most = max(self._share, divided)

    def _is_own(self, seq: Sequence) -> bool:
        return seq.parts.samples is self


def limit_samples(seqs: list[Sequence], num_places: int, share: int) -> None:
    """Bound the samples of a request: see `SampleLimit`."""
    limit = SampleLimit(num_places, share, seqs[0].order[0])
    for seq in seqs:
        seq.parts.samples = limit
