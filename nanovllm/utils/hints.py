"""Hints for errors: which known name the user likely meant by an unknown one."""

import difflib
import re
from collections.abc import Collection

# Pairs of characters that may be compared for one hint. Clients of a server choose the name, and
# some lists too, such as that of their tools: there is no hint if these are long.
MOST_PAIRS = 1 << 18


def likely_name(name: str, known: Collection[str]) -> str | None:
    """The known name that is likely meant, if there is one.

    This is a name that differs in a letter or two. Otherwise, unless `name` is short, it is the
    only known name with all of its words or their beginnings ("freq_penalty"), or with most of its
    words. Numbers must be equal: float16 is not suggested for float64.
    """
    if len(name) * sum(map(len, known)) > MOST_PAIRS:
        return None
    near = [
        one
        for one in difflib.get_close_matches(name.lower(), known, cutoff=0.8)
        if re.sub(r"\D", "", one) == re.sub(r"\D", "", name)
    ][:1]
    words = _words(name)
    if not near and sum(map(len, words)) > 3:
        longer = [one for one in known if all(_begins(word, _words(one)) for word in words)]
        shorter = [
            one
            for one in known
            if set(_words(one)) <= set(words) and 2 * len(_words(one)) > len(words)
        ]
        near = next((found for found in (longer, shorter) if len(found) == 1), [])
    return near[0] if near else None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _begins(word: str, others: list[str]) -> bool:
    """Whether one of `others` begins with `word`; a word of two letters must be equal."""
    return any(other.startswith(word) if len(word) > 2 else other == word for other in others)
