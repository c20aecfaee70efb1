"""Batch: the one value in which the scheduler side and the runner side meet."""

from dataclasses import dataclass, field

from nanovllm.engine.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """The sequences of one step.

    Each computes its `num_scheduled_tokens` tokens after the `num_cached_tokens` that are in the
    cache; decode steps carry one token for each sequence. A prefill may carry sequences that decode
    along: its first `num_decodes`. A fork is a sequence and one of its followers: the follower
    computes nothing, and is sampled from the logits of the sequence.

    `sampling_seqs` are those that the step yields a token for. Once the step is on its way, the
    scheduler notes in `ends` how far each of `all_seqs` has been computed by it.
    """

    seqs: list[Sequence]
    is_prefill: bool
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    num_decodes: int = 0
    all_seqs: list[Sequence] = field(init=False)
    sampling_seqs: list[Sequence] = field(init=False)
    ends: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.all_seqs = self.sampling_seqs = self.seqs
        if self.is_prefill:
            self.all_seqs = [*self.seqs, *(follower for _, follower in self.forks)]
            self.sampling_seqs = [seq for seq in self.all_seqs if seq.samples]
