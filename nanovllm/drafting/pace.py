"""Pace: find how many drafts of a sequence are worth their cost, by how many were right lately."""

# A verified step multiplies the weight of earlier drafts by this: of a sequence's own, and of all.
MEMORY, OUTLOOK_MEMORY = 0.85, 0.95
# The first estimate of the share of right drafts, with the weight of FIRST_WEIGHT drafts.
FIRST_CHANCE, FIRST_WEIGHT = 0.8, 1.5
# The outlook counts as much as this number of a sequence's own drafts.
OUTLOOK_WEIGHT = 2
# The tokens after a wrong draft until another draft is tried: the first number, doubled with each
# wrong draft up to the second.
PAUSES = (8, 256)
# If a draft must be right more often than this to pay, a step's time is mostly arithmetic, and
# tries cost too much.
TRIES_UP_TO = 0.5


class Outlook:
    """The chance that a draft is right if those before it are, from all sequences' latest drafts.

    A new sequence starts with this estimate, because an engine's texts are often similar.
    """

    def __init__(self, chance: float = FIRST_CHANCE) -> None:
        self.chance = chance
        self._right, self._weight = chance * FIRST_WEIGHT, FIRST_WEIGHT

    def learn(self, num_accepted: int, is_wrong: bool) -> None:
        """Count the right drafts of a step, and whether one was wrong."""
        self._right = OUTLOOK_MEMORY * self._right + num_accepted
        self._weight = OUTLOOK_MEMORY * self._weight + num_accepted + is_wrong
        self.chance = self._right / self._weight


class Pace:
    """The same chance for one sequence, from its own latest drafts and the outlook.

    If the chance is p, the i-th of a step's drafts is accepted with probability p^i. A draft pays
    if this is at least `worth` (the least probability that pays for verifying it) plus `guess` (the
    cost of guessing it). If no draft pays, a single draft is tried at growing intervals.
    """

    def __init__(self, outlook: Outlook | None = None) -> None:
        self._outlook = Outlook() if outlook is None else outlook
        self._right = self._weight = 0.0
        self._gains = [0.0]
        self._pause = PAUSES[0]
        self._next_try = 0  # in tokens of the sequence

    @property
    def chance(self) -> float:
        """The estimate."""
        expected = OUTLOOK_WEIGHT * self._outlook.chance
        return (self._right + expected) / (self._weight + OUTLOOK_WEIGHT)

    def gains(self, number: int) -> list[float]:
        """The mean number of right drafts among 0, 1, 2, ... drafts: up to `number`, or more."""
        gains = self._gains
        if len(gains) <= number:
            chance = self.chance
            for exponent in range(len(gains), number + 1):
                gains.append(gains[-1] + chance**exponent)
        return gains

    def is_due(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens should try a draft, if none pays."""
        return num_tokens >= self._next_try

    def most(self, num_tokens: int, worth: float, limit: int, guess: float = 0.0) -> int:
        """How many drafts, up to `limit`, a sequence of `num_tokens` tokens should have."""
        chance = self.chance
        number, probability = 0, chance
        while number < limit and probability >= worth + guess:
            number += 1
            probability *= chance
        could_pay = worth <= TRIES_UP_TO and worth + guess < 1
        if number == 0 and could_pay and self.is_due(num_tokens):
            return min(1, limit)
        return number

    def learn(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """Count a step's drafts: all right ones, and the first wrong one if there is one."""
        is_wrong = num_accepted < num_drafts
        self._right = MEMORY * self._right + num_accepted
        self._weight = MEMORY * self._weight + num_accepted + is_wrong
        self._gains = [0.0]
        self._outlook.learn(num_accepted, is_wrong)
        if num_accepted:
            self._pause, self._next_try = PAUSES[0], 0
        else:
            self._next_try = num_tokens + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
