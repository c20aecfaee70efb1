"""Batch: the one value in which the scheduler side and the runner side meet."""

from dataclasses import dataclass, field

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step.

    Each computes its `num_scheduled_tokens` tokens after the `num_cached_tokens` that are in the
    cache; decode steps carry one token for each sequence. A fork is a sequence and one of its
    followers: this computes nothing, and is sampled from what the first computes.
    """

    seqs: list[Sequence]
    is_prefill: bool
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)

    @property
    def sampling_seqs(self) -> list[Sequence]:
        """Those that the step yields a token for."""
        if not self.is_prefill:
            return self.seqs
        return [*(seq for seq in self.seqs if seq.samples), *(seq for _, seq in self.forks)]
