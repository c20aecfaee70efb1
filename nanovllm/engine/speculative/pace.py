"""Pace: how many drafts of a sequence are worth their cost, by how many were right lately."""

# What each verified draft leaves of the earlier ones' weight.
MEMORY = 0.75
# Before anything is known: this share of drafts is right, with the weight of so many drafts.
FIRST_CHANCE, FIRST_WEIGHT = 0.8, 1.5
# Tokens after a wrong draft until another one is tried: doubled for each, up to the last.
PAUSES = (8, 256)
# Above it a step's time is mostly arithmetic, where a draft only to try costs too much.
TRIES_UP_TO = 0.5


class Pace:
    """The chance that a draft is right if those before it are, estimated from the latest ones.

    If the chance is p, the i-th of a step's drafts counts with probability p^i: so many are worth
    it for which that is at least `worth`, the least probability that pays for a draft. If none is,
    a single draft is tried now and then, at growing intervals.
    """

    def __init__(self) -> None:
        self._right, self._weight = FIRST_CHANCE * FIRST_WEIGHT, FIRST_WEIGHT
        self._gains = [0.0]
        self._pause = PAUSES[0]
        self._next_try = 0  # in tokens of the sequence

    @property
    def chance(self) -> float:
        """The estimate."""
        return self._right / self._weight

    def gains(self, number: int) -> list[float]:
        """How many of 0, 1, 2, ... drafts are right, on average: up to `number`, or more."""
        gains = self._gains
        if len(gains) <= number:
            chance = self.chance
            for exponent in range(len(gains), number + 1):
                gains.append(gains[-1] + chance**exponent)
        return gains

    def is_due(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens should try a draft, if none is worth it."""
        return num_tokens >= self._next_try

    def most(self, num_tokens: int, worth: float, limit: int) -> int:
        """How many drafts, `limit` at most, a sequence of so many tokens should have."""
        chance = self.chance
        number, probability = 0, chance
        while number < limit and probability >= worth:
            number += 1
            probability *= chance
        if number == 0 and worth <= TRIES_UP_TO and self.is_due(num_tokens):
            return min(1, limit)
        return number

    def learn(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """Count a step's drafts: all right ones, and the first wrong one if there is one."""
        is_wrong = num_accepted < num_drafts
        self._right = MEMORY * self._right + num_accepted
        self._weight = MEMORY * self._weight + num_accepted + is_wrong
        self._gains = [0.0]
        if num_accepted:
            self._pause, self._next_try = PAUSES[0], 0
        else:
            self._next_try = num_tokens + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
