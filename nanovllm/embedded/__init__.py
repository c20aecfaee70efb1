"""A trained two-megabyte Qwen3 model that adds numbers, shipped with the package.

With it, everything from a checkpoint directory to generated text runs and is tested without a
download: after a prompt like ``12+34=`` the greedy continuation is ``46`` and the end-of-text
token. It can only add two integers between 0 and 999; any other prompt is accepted and gets a
meaningless answer. Importing this module reads no file and loads no heavy library.
``tools/train_embedded_model.py`` makes the files. An EAGLE-3 head for it, by which speculation is
tested, is made by ``tools/train_embedded_head.py``.
"""

import random
from pathlib import Path

EMBEDDED_MODEL: str = str(Path(__file__).resolve().parent)
"""Absolute path of the directory that holds the model and its tokenizer."""

EMBEDDED_HEAD: str = str(Path(EMBEDDED_MODEL) / "head")
"""Absolute path of the directory that holds an EAGLE-3 head for the model."""

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
