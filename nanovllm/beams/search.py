"""Search: one prompt's beam search, as transformers defines it. It knows no engine and no text."""

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from nanovllm.beam_search_params import BeamSearchParams


class Beam(NamedTuple):
    """A running sequence: its generated tokens, and the sum of their log-probabilities."""

    token_ids: list[int]
    logprob: float


class FinishedBeam(NamedTuple):
    """A sequence that has ended. The score is its log-probability with the length penalty."""

    token_ids: list[int]
    logprob: float
    score: float
    reason: Literal["stop", "length"]


def candidates_per_beam(eos_token_ids: Collection[int]) -> int:
    """The extensions of each beam to keep, so that as many as there are beams do not end."""
    return max(2, 1 + len(eos_token_ids))


class Search:
    """Keeps `beam_width` running sequences, and up to `beam_width` sequences that have ended.

    Each step extends all running sequences by their most likely tokens, and takes the best
    `num_candidates` extensions. The best of them that do not end go on; those that end count if
    they are among the best `beam_width`. `most_tokens` is the longest output.
    """

    def __init__(
        self, params: BeamSearchParams, most_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.width = params.beam_width
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self.num_candidates = candidates_per_beam(self._eos) * self.width
        self._most_tokens = most_tokens
        self._penalty = params.length_penalty
        # A search with one beam is greedy decoding.
        self._early = params.early_stopping if self.width > 1 else True
        self._may_improve = True
        self.running = [Beam([], 0.0)]
        self.ended: list[FinishedBeam] = []  # the best one first
        self.is_over = False

    def advance(self, likely: Iterable[Iterable[tuple[int, float]]]) -> None:
        """Add a token to each running sequence, given its most likely next tokens.

        These are `num_candidates` token ids with their log-probabilities, or all tokens if fewer.
        """
        scored = [
            (beam.logprob + logprob, place, token_id)
            for place, (beam, tokens) in enumerate(zip(self.running, likely, strict=True))
            for token_id, logprob in tokens
        ]
        best = sorted(scored, key=lambda each: (-each[0], *each[1:]))[: self.num_candidates]
        length = len(self.running[0].token_ids) + 1
        at_end = length == self._most_tokens
        candidates = [
            Beam([*self.running[place].token_ids, token_id], logprob)
            for logprob, place, token_id in best
        ]
        self._end(candidates[: self.width], length, at_end)
        going = [beam for beam in candidates if beam.token_ids[-1] not in self._eos]
        self.running = going[: self.width]
        self._decide(length, at_end)

    def score(self, logprob: float, length: int) -> float:
        """The score of a sequence with this log-probability and this number of tokens."""
        score: float = logprob / length**self._penalty
        return score

    def _end(self, candidates: list[Beam], length: int, at_end: bool) -> None:
        """Keep those of the best candidates that end here, if they still count."""
        if not self._may_improve or (self._is_full and self._early is True):
            return
        for token_ids, logprob in candidates:
            has_stopped = token_ids[-1] in self._eos
            if has_stopped or at_end:
                score = self.score(logprob, length)
                reason: Literal["stop", "length"] = "stop" if has_stopped else "length"
                self.ended.append(FinishedBeam(token_ids, logprob, score, reason))
        self.ended = sorted(self.ended, key=lambda one: -one.score)[: self.width]

    def _decide(self, length: int, at_end: bool) -> None:
        """Whether the search is over."""
        if at_end or not self.running:
            self.is_over = True
            return
        if self._is_full:
            longest = self._early == "never" and self._penalty > 0
            hoped = self._most_tokens if longest else length
            best = self.score(self.running[0].logprob, hoped)
            self._may_improve = self._may_improve and best > self.ended[-1].score
            self.is_over = not self._may_improve or self._early is True

    @property
    def _is_full(self) -> bool:
        return len(self.ended) == self.width
