"""How long a rank polls before it sleeps, by what became of its last wait."""

from time import perf_counter

BRIEF_SECONDS = 5e-5


class Spin:
    """The time until which a wait polls: `longest` seconds, unless the last wait took longer.

    Then the next one polls for a moment only. A rank waits longer than usual if cores are busy with
    other processes, and a rank that polls keeps a core from the rank that it waits for. One short
    wait is enough to poll as long as before.
    """

    def __init__(self, longest: float) -> None:
        self._longest = self._seconds = longest
        self._start = 0.0

    def begin(self) -> float:
        """Begin to wait; returns until when to poll."""
        self._start = perf_counter()
        return self._start + self._seconds

    def end(self) -> None:
        """What the rank waited for has happened."""
        is_long = perf_counter() - self._start > self._longest
        self._seconds = BRIEF_SECONDS if is_long else self._longest
