"""Batch: the value that goes from the scheduler to the runner."""

from dataclasses import dataclass, field

from nanovllm.engine.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """The sequences of one step.

    Each computes its `num_scheduled_tokens` tokens after the `num_cached_tokens` in the cache; a
    decode step has one token for each sequence. The first `num_decodes` sequences of a prefill
    decode. A fork is a sequence and one of its siblings: the sibling computes nothing, and samples
    from the logits of the sequence.

    `sampling_seqs` are those that the step samples a token for. When the step is launched, the
    scheduler notes in `ends` up to which token each of `all_seqs` is computed by it.
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
            self.all_seqs = [*self.seqs, *(sibling for _, sibling in self.forks)]
            self.sampling_seqs = [seq for seq in self.all_seqs if seq.samples]
