"""Costs of patterns: refuses those that would compile for minutes, in gigabytes.

llguidance derives a pattern by its next letter. If the first k of n parts that follow each other
may be left out, this makes k patterns of n parts at once, and no limit of llguidance stops it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

MOST_COST = 4_000_000  # parts; this takes a tenth of a second
OPTIONAL = r"(?P<optional>[?*]|\{0?,|\{0\}|~ ?0)?"
IN_PATTERN = re.compile(
    r"(?P<open>\((?:\?(?:P?<[^>(]*>|[a-zA-Z-]*:?))?)|(?P<close>\))" + OPTIONAL + r"|(?P<or>\|)"
    r"|(?P<part>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[^()|])(?P<may>[?*]|\{0?,|\{0\})?",
    re.DOTALL,
)
IN_LARK = re.compile(
    r"(?P<comment>//[^\n]*|#[^\n]*)|(?P<open>[(\[])|(?P<close>\)|\])[ \t]*" + OPTIONAL
    + r"|(?P<or>\|)|(?P<part>\"(?:\\.|[^\"\\\n])*\"?|/(?:\\.|[^/\\\n])+/?[imslux]*|[\w-]+)[ \t]*"
    r"(?P<may>[?*]|\{0?,|\{0\}|~ ?0)?"
)  # fmt: skip
# Each letter is read once: blanks that two parts could take would be divided in all ways.
TERMINAL = re.compile(r"^[ \t]*([A-Z_][A-Z_0-9]*)(?:\[[^\]\n]*\])?[ \t]*(?:\.-?\d+[ \t]*)?:", re.M)
DEFINITION = re.compile(r"^[ \t]*[?!]?[\w-]+(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:|^[ \t]*%", re.M)


class Size(NamedTuple):
    """Parts that follow each other, how many of them are optional, and the cost of all parts."""

    parts: int = 0
    optional: int = 0
    cost: int = 0

    def __add__(self, other: "Size") -> "Size":  # type: ignore[override]
        return Size(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def whole(self) -> "Size":
        """As one part of another pattern, which may be optional."""
        return Size(1, 1, self.cost + self.parts * self.optional)


class Group:
    """A group in brackets that is being read."""

    def __init__(self) -> None:
        self.last, self.others = Size(), Size()  # the last alternative, and the cost of others
        self.has_others = False

    def end_alternative(self) -> None:
        """Begin the next alternative."""
        self.others += Size(0, 0, self.last.whole.cost)
        self.last, self.has_others = Size(), True

    def size(self, is_optional: bool) -> Size:
        """The group as parts of the one around it: its parts are parts there, if it may."""
        if self.has_others or is_optional:
            return Size(1, 1, self.others.cost + self.last.whole.cost)
        return self.last


def size_of_pattern(pattern: str) -> Size:
    """The size of a regular expression."""
    return _size(IN_PATTERN.finditer(pattern), {})


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that costs too much."""
    _check(size_of_pattern(pattern))


def check_lark(lark: str) -> None:
    """Refuse a grammar with a terminal that costs too much, with the terminals in it."""
    sizes: dict[str, Size] = {}
    found = [*TERMINAL.finditer(lark)]
    bodies = {one[1]: _body(lark, one.end()) for one in found}
    for name in _inner_first(bodies):
        sizes[name] = _size(IN_LARK.finditer(bodies[name]), sizes)
        _check(sizes[name])
    for one in IN_LARK.finditer(lark):
        if (one["part"] or "").startswith("/"):
            check_pattern(_between(one["part"]))


def _body(lark: str, start: int) -> str:
    """The definition that starts here: it ends where the next one begins."""
    after = DEFINITION.search(lark, start)
    return lark[start : after.start() if after else len(lark)]


def _inner_first(bodies: dict[str, str]) -> Iterator[str]:
    """The terminals, each one after those in its body. A circle is an error of llguidance's."""
    done: set[str] = set()
    names = re.compile(r"\b[A-Z_][A-Z_0-9]*\b")
    for first in bodies:
        left = [(first, False)]
        while left:
            name, is_ready = left.pop()
            if is_ready:
                yield name
            elif name not in done and name in bodies:
                done.add(name)
                left.append((name, True))
                left += [(inner, False) for inner in names.findall(bodies[name])]


def _size(found: "Iterator[re.Match[str]]", sizes: dict[str, Size]) -> Size:
    groups = [Group()]
    for one in found:
        if one["open"]:
            groups.append(Group())
            groups[-1].has_others = one["open"] == "["  # Lark's brackets: optional
        elif one["or"]:
            groups[-1].end_alternative()
        elif one["part"]:
            size = _size_of_part(one["part"], sizes)
            groups[-1].last += size.whole if one["may"] and size.parts != 1 else size
            if one["may"] and size.parts == 1:
                groups[-1].last += Size(0, 1 - size.optional)
        elif one["close"] and len(groups) > 1:
            closed = groups.pop()
            groups[-1].last += closed.size(bool(one["optional"]))
    return _closed(groups)


def _closed(groups: list[Group]) -> Size:
    while len(groups) > 1:  # brackets that are not closed are an error of llguidance's
        closed = groups.pop()
        groups[-1].last += closed.size(False)
    return groups[0].size(False)


def _size_of_part(part: str, sizes: dict[str, Size]) -> Size:
    if len(part) > 1 and part[0] == "/":
        return size_of_pattern(_between(part))
    if part[0] == '"' and len(part) > 1:
        return Size(len(part) - 2)
    return sizes.get(part, Size(1))


def _between(part: str) -> str:
    """A pattern between slashes, without its flags."""
    return part[1:].rpartition("/")[0]


def _check(size: Size) -> None:
    cost = size.whole.cost
    if cost > MOST_COST:
        raise ValueError(
            f"it is too complex: parts that may be left out, times the parts that follow each other"
            f" with them, must be at most {MOST_COST}, got {cost}"
        )
