"""Formats that are made of other formats: sequences, choices, repetitions and tags."""

import itertools
from typing import Any

from nanovllm.structured.lark import literal
from nanovllm.structured.structural_tags.formats import (
    Format,
    Mark,
    as_list,
    count_of,
    flag_of,
    kind_of,
    listed,
    text_of,
)
from nanovllm.structured.structural_tags.openings import elements_of, heads_of, is_open
from nanovllm.structured.structural_tags.writer import NOTHING, Ends, GrammarWriter, any_of


def sequence(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Formats one after the other."""
    return _row(writer, elements_of(place, node), ends)


def _row(writer: GrammarWriter, items: list[tuple[str, Any]], ends: Ends) -> str:
    """Formats one after the other. A format without an end is written up to the next one."""
    written: list[str] = []
    for first, following in itertools.pairwise(items):
        heads = heads_of(writer, *following) if is_open(*first) else []
        if heads:
            others = items[len(written) + 1 :]
            return " ".join([*written, _up_to(writer, heads, first, others, ends)])
        written.append(writer.format(*first, NOTHING))
    return " ".join([*written, writer.format(*items[-1], ends)])


def _up_to(
    writer: GrammarWriter,
    heads: list[tuple[Mark, Format | None]],
    first: tuple[str, Any],
    others: list[tuple[str, Any]],
    ends: Ends,
) -> str:
    """A format up to one of the marks that the next format begins with, and the rest after it."""
    ways = []
    for mark, rest in heads:
        left = ([] if rest is None else [(others[0][0], rest)]) + others[1:]
        behind = _row(writer, left, ends) if left else writer.marks(ends)
        final = ends.final and not ends.marks and not left
        ways.append(f"{writer.format(*first, Ends((mark,), final))} {behind}")
    return any_of(ways)


def one_of(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """One of several formats."""
    with writer.whole_texts(is_open(place, node)):
        return any_of(writer.format(*item, ends) for item in elements_of(place, node))


def optional(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """The content, or nothing."""
    content = writer.format(f"{place}/content", node["content"], ends)
    return any_of([content, writer.marks(ends) or literal("")])


def star(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """The content any number of times."""
    return _repeated(writer, place, node, "*", ends)


def plus(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """The content at least once."""
    return _repeated(writer, place, node, "+", ends)


def repeat(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """The content `min` to `max` times; a `max` of -1 means no limit."""
    least, most = count_of(f"{place}/min", node["min"]), node["max"]
    if most == -1:
        return _repeated(writer, place, node, f"{{{least},}}", ends)
    most = count_of(f"{place}/max", most, least)
    return _repeated(writer, place, node, f"{{{least},{most}}}", ends)


def _repeated(writer: GrammarWriter, place: str, node: Format, times: str, ends: Ends) -> str:
    content = writer.format(f"{place}/content", node["content"], NOTHING)
    return f"({content}){times} {writer.marks(ends)}"


def tag(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """The content between `begin` and `end`, or one of several ends."""
    begin = writer.mark_of(f"{place}/begin", node["begin"])
    marks = [writer.mark_of(f"{place}/end", one) for one in as_list(node["end"])]
    if not marks:
        raise ValueError(f"{place}/end must be a text, several, or a format `token`, got []")
    content, ways = (f"{place}/content", node["content"]), []
    own = Ends(tuple(m for m in marks if m != ""), ends.final and not ends.marks)
    if own.marks:
        ways.append(f"{writer.format(*content, own)} {writer.marks(ends)}")
    if "" in marks:
        ways.append(writer.format(*content, ends))
    return f"{writer.mark(begin)} {any_of(ways)}"


def tags_with_separator(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Tags with a text between them."""
    least = flag_of(place, node, "at_least_one")
    separator = text_of(f"{place}/separator", node["separator"])
    one = writer.rule(any_of(writer.format(*item, NOTHING) for item in tags_of(place, node)))
    is_last = flag_of(place, node, "stop_after_first")
    tags = one if is_last else f"{one} ({writer.mark(separator)} {one})*"
    return f"({tags}){'' if least else '?'} {writer.marks(ends)}"


def tags_of(place: str, node: Format) -> list[tuple[str, Any]]:
    """The tags of a format, with their places; a tag may lack its `type`."""
    tags = listed(f"{place}/tags", node["tags"], dict)
    items = [(f"{place}/tags/{i}", {"type": "tag", **tag}) for i, tag in enumerate(tags)]
    for at, tag in items:
        if kind_of(at, tag) != "tag":
            raise ValueError(f"{at} must be a tag, got type {tag['type']!r}")
    return items
