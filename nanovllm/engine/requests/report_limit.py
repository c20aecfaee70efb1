"""ReportLimit: bounds how many prompt tokens a step reports while other requests wait for it."""

from collections.abc import Iterable

from nanovllm.engine.schedule.sequence import Sequence

MOST_REPORTED = 256  # prompt tokens in a step, while other requests wait


class ReportLimit:
    """Shares `most` tokens among the prompts of a step whose log-probabilities are wanted.

    Each of their tokens has logits of the whole vocabulary to rank, and as many entries for the
    host as the request asks for. A step is not bounded if all other requests are of this kind, and
    none decodes. The requests of an engine have one limit together.
    """

    def __init__(self, most: int = MOST_REPORTED) -> None:
        self._most = most
        self._prompts: list[Sequence] = []  # of the step; each step has a list of its own
        self._num_counted = self._left = 0

    def share(
        self,
        budget: int,
        prompts: list[Sequence],
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
    ) -> int:
        """How many tokens a prompt with reports may compute, after the step's other `prompts`."""
        if prompts is not self._prompts:
            self._prompts, self._num_counted = prompts, 0
            others = any(map(_is_other, running)) or not all(map(wants_reports, waiting))
            self._left = self._most if others else budget
        self._left -= sum(map(_num_reported, prompts[self._num_counted :]))
        self._num_counted = len(prompts)
        return max(0, min(budget, self._left))


def wants_reports(seq: Sequence) -> bool:
    """Whether log-probabilities of the prompt are still to be computed."""
    return seq.parts.logprobs is not None and bool(seq.parts.logprobs.wanted)


def _num_reported(seq: Sequence) -> int:
    """How many tokens of a step count for the limit: the prompt's last one reports nothing."""
    return seq.num_scheduled_tokens if wants_reports(seq) else 0


def _is_other(seq: Sequence) -> bool:
    """Whether a running sequence decodes, or has a prompt without reports to compute."""
    return not (seq.ends_in_flight or (seq.is_prefilling and wants_reports(seq)))
