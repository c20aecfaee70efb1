"""Sums that the embedded model was not trained on, with their answers."""

import random

MAX_DIGITS = 3
_SAMPLE_SEED = 20250427
_SMALLEST = (0, 10, 100)
_LARGEST = (9, 99, 999)


def sample_problems(n: int = 2000) -> list[tuple[str, str]]:
    """Return the first `n` held-out problems as distinct (prompt, answer) pairs.

    The list is fixed: a shorter one is a prefix of a longer one. Training leaves out the default
    2,000 ordered pairs of operands, so a model that answers them correctly did not memorise them
    (the same operands in the other order may have been trained on). The number of digits of each
    operand is drawn uniformly from 1 to 3, but at most a quarter of the pairs of any two lengths is
    held out, so that training sees most of the hundred one-digit sums.

    Raises ValueError when `n` is negative or more than 200,000.
    """
    if not 0 <= n <= 200_000:
        raise ValueError(f"n must be in [0, 200000], got {n}")
    rng = random.Random(_SAMPLE_SEED)
    room = {
        (i, j): (_LARGEST[i] - _SMALLEST[i] + 1) * (_LARGEST[j] - _SMALLEST[j] + 1) // 4
        for i in range(MAX_DIGITS)
        for j in range(MAX_DIGITS)
    }
    # A dict as a set, because it keeps the order of insertion.
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < n:
        i, j = rng.randrange(MAX_DIGITS), rng.randrange(MAX_DIGITS)
        pair = (rng.randint(_SMALLEST[i], _LARGEST[i]), rng.randint(_SMALLEST[j], _LARGEST[j]))
        if room[i, j] > 0 and pair not in pairs:
            room[i, j] -= 1
            pairs[pair] = None
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]
