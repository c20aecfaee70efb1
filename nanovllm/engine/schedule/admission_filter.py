"""AdmissionFilter: what `Admission` asks a feature that keeps sequences waiting."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from nanovllm.engine.schedule.sequence import Sequence


class AdmissionFilter(Protocol):
    """Says which waiting sequences may run now. `Admission` asks it in each `admit`."""

    def admissible(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """The waiting sequences that may run, in order; `running` may grow between two of them."""
