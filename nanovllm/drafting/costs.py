"""Costs: find how many drafts are worth the time that they add to a step."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from nanovllm.drafting.pace import Pace
from nanovllm.engine.schedule.batch import Size

# The number of tokens that a CPU computes in the time in which it reads the weights: a step of B
# tokens takes as long as FREE_TOKENS + B tokens. docs/tried/speculation.md has the measurements.
FREE_TOKENS = 10
# If draws depend on drafts, the host waits for the drafts and then prepares the draws. This adds
# seconds to the device's time: for a step, and for each query in it.
HOST_SECONDS, HOST_SECONDS_OF_QUERY = 120e-6, 35e-6
# If no draft pays, at most this share of the time is used to try drafts.
TRIED_SHARE = 0.02
# If a draft model has to catch up, drafts begin again only if they make steps faster by this
# factor.
WORTH_TO_CATCH_UP = 1.05


class Candidate(NamedTuple):
    """A sequence that may have drafts, `limit` at most."""

    pace: Pace
    num_tokens: int
    limit: int


class Costs(Protocol):
    """Knows how long steps take."""

    def worthwhile(
        self, candidates: list[Candidate], num_tokens: int, waits: bool
    ) -> Iterator[int]:
        """How many drafts each sequence should have in a step of `num_tokens` other tokens.

        `waits`: whether the draws of the step wait until the drafts are known.
        """


class TokenCosts:
    """Each token adds the same time to a step: B of them take FREE_TOKENS + B units.

    So a token takes (FREE_TOKENS + B) / B units and a draft takes 1: a draft pays if it is right
    with a probability of at least B / (FREE_TOKENS + B). With few sequences nearly every draft
    pays, with many nearly none. `guess` is the time to guess a draft for each sequence, as a share
    of a step: it is added to that probability.
    """

    def __init__(self, guess: float = 0.0) -> None:
        self._guess = guess

    def worthwhile(
        self, candidates: list[Candidate], num_tokens: int, waits: bool
    ) -> Iterator[int]:
        """By each sequence's own chance; its drafts raise the cost of the next one's drafts."""
        del waits  # where the host drafts, all steps wait
        for pace, length, limit in candidates:
            worth = num_tokens / (FREE_TOKENS + num_tokens)
            number = pace.most(length, worth, limit, self._guess)
            num_tokens += number
            yield number


class GraphCosts:
    """A step takes as long as the decode graph of its size, which was timed with its guesses.

    All sequences have the same number of drafts: the one that gives the most tokens per second, by
    the chances of all of them. `catch_up` are the seconds that the guesser needs to see the tokens
    of steps without drafts.
    """

    def __init__(self, seconds: Mapping[Size, float], catch_up: float = 0.0) -> None:
        self._seconds, self._catch_up = seconds, catch_up
        self._most_credit = self._credit = catch_up + max(seconds.values())
        self._had_drafts = True
        self._by_number: dict[tuple[int, bool], dict[int, float]] = {}

    def worthwhile(
        self, candidates: list[Candidate], num_tokens: int, waits: bool
    ) -> Iterator[int]:
        """The same number for all, or a sequence's limit if less; 0 in a step with prompts."""
        has_prompts = num_tokens > len(candidates)
        number = 0 if has_prompts else self._best(candidates, waits)
        return (min(number, candidate.limit) for candidate in candidates)

    def _best(self, candidates: list[Candidate], waits: bool) -> int:
        seconds = self._seconds_by_drafts(len(candidates), waits)
        if len(seconds) < 2:
            self._had_drafts = False
            return 0
        most = max(seconds)
        gains = [(pace.gains(most), limit) for pace, _, limit in candidates]

        def speed(number: int) -> float:
            more = sum([of[number if number < limit else limit] for of, limit in gains])
            return (len(gains) + more) / seconds[number]

        best = max(seconds, key=speed)
        if self._catch_up and not self._had_drafts and speed(best) < WORTH_TO_CATCH_UP * speed(0):
            best = 0
        due = [limit > 0 and pace.is_due(length) for pace, length, limit in candidates]
        if best == 0 and 4 * sum(due) >= len(due):
            best = self._tried(seconds)
        self._credit = min(self._credit + TRIED_SHARE * seconds[0], self._most_credit)
        self._had_drafts = best > 0
        return best

    def _tried(self, seconds: dict[int, float]) -> int:
        """How many drafts to try; 0 if this would take more time than is left for tries."""
        fewest = min(number for number in seconds if number)
        cost = seconds[fewest] - seconds[0] + self._catch_up
        if cost > self._credit:
            return 0
        self._credit -= max(0.0, cost)
        return fewest

    def _seconds_by_drafts(self, num_seqs: int, waits: bool) -> dict[int, float]:
        """The seconds of a step of `num_seqs` sequences, by the number of drafts of each."""
        if (num_seqs, waits) not in self._by_number:
            sizes = sorted(size for size in self._seconds if size.num_seqs >= num_seqs)
            nearest = {size.num_queries: size for size in reversed(sizes)}
            self._by_number[num_seqs, waits] = {
                queries - 1: self._seconds[size] + self._host(num_seqs, queries) * waits
                for queries, size in nearest.items()
            }
        return self._by_number[num_seqs, waits]

    def _host(self, num_seqs: int, queries: int) -> float:
        return HOST_SECONDS + num_seqs * queries * HOST_SECONDS_OF_QUERY if queries > 1 else 0.0
