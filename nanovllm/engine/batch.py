"""Batch: the one value in which the scheduler side and the runner side meet."""

from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step.

    Each computes its `num_scheduled_tokens` tokens after the `num_cached_tokens` that are in the
    cache; decode steps carry one token for each sequence.
    """

    seqs: list[Sequence]
    is_prefill: bool

    @property
    def sampling_seqs(self) -> list[Sequence]:
        """Those that the step yields a token for."""
        return [seq for seq in self.seqs if seq.samples] if self.is_prefill else self.seqs
