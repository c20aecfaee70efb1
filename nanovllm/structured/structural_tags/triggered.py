"""Formats of free text in which other formats begin at triggers."""

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.structured.structural_tags.composed import tags_of
from nanovllm.structured.structural_tags.formats import (
    Format,
    Mark,
    flag_of,
    listed,
    text_of,
    texts_of,
)
from nanovllm.structured.structural_tags.writer import NOTHING, Ends, GrammarWriter, any_of
from nanovllm.utils.checks import shorten

Way = tuple[Mark, str]  # a mark, and the rule for what must follow it


def triggered_tags(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free text; a trigger in it begins one of the tags."""
    triggers = texts_of(place, node, "triggers")
    if not triggers:
        raise ValueError(f"{place}/triggers must be a list of texts that is not empty, got []")
    behind, ways = Ends(final=ends.final and not ends.marks), []
    for at, tag in tags_of(place, node):
        begin = text_of(f"{at}/begin", tag["begin"])
        # The shortest trigger: it is complete before longer ones.
        trigger = min((t for t in triggers if begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise ValueError(f"{at}: no trigger begins {shorten(begin)}")
        rest = {**tag, "begin": begin[len(trigger) :]}
        ways.append((trigger, writer.rule(writer.format(at, rest, behind))))
    return _in_text(writer, place, node, ways, ends)


def token_triggered_tags(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free tokens; a trigger begins one of the tags."""
    triggers = writer.token_ids(place, node, "trigger_tokens")
    behind, ways = Ends(final=ends.final and not ends.marks), []
    for at, tag in tags_of(place, node):
        begin = writer.mark_of(f"{at}/begin", tag["begin"])
        if begin not in triggers:
            raise ValueError(f"{at}: no trigger token is {shorten(tag['begin'])}")
        ways.append((begin, writer.rule(writer.format(at, {**tag, "begin": ""}, behind))))
    return _in_tokens(writer, place, node, ways, triggers, ends)


def dispatch(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free text; where the text of a rule occurs, its format follows."""
    return _in_text(writer, place, node, _rules_of(writer, place, node, writer.mark_of), ends)


def token_dispatch(writer: GrammarWriter, place: str, node: Format, ends: Ends) -> str:
    """Free tokens; the format of a rule follows its token."""
    ways = _rules_of(writer, place, node, writer.token_id)
    triggers = [mark for mark, _ in ways if isinstance(mark, int)]
    return _in_tokens(writer, place, node, ways, triggers, ends)


def _rules_of(
    writer: GrammarWriter, place: str, node: Format, mark_of: Callable[[str, Any], Mark]
) -> list[Way]:
    """The rules of a dispatch."""
    ways = []
    for i, one in enumerate(listed(f"{place}/rules", node["rules"], list)):
        if len(one) != 2 or one[0] == "":
            raise ValueError(f"{place}/rules/{i} must be a pair, got {shorten(one)}")
        written = writer.rule(writer.format(f"{place}/rules/{i}/1", one[1], NOTHING))
        ways.append((mark_of(f"{place}/rules/{i}/0", one[0]), written))
    return ways


def _in_text(
    writer: GrammarWriter, place: str, node: Format, ways: Sequence[Way], ends: Ends
) -> str:
    excluded = texts_of(place, node, "excludes")
    free = lambda behind: writer.free_text(place, excluded, behind)  # noqa: E731
    return _dispatched(writer, place, node, ways, free, ends)


def _in_tokens(
    writer: GrammarWriter,
    place: str,
    node: Format,
    ways: Sequence[Way],
    triggers: list[int],
    ends: Ends,
) -> str:
    excluded = [*triggers, *writer.token_ids(place, node, "exclude_tokens")]
    free = lambda behind: writer.free_tokens(place, excluded, behind)  # noqa: E731
    return _dispatched(writer, place, node, ways, free, ends)


def _dispatched(
    writer: GrammarWriter,
    place: str,
    node: Format,
    ways: Sequence[Way],
    free: Callable[[Ends], str],
    ends: Ends,
) -> str:
    """Free text up to each mark, after which its rule applies; free text at the end."""
    first = flag_of(place, node, "at_least_one")
    once = flag_of(place, node, "stop_after_first") or not flag_of(place, node, "loop", True)
    begun = any_of(f"{writer.mark(mark)} {rule}" for mark, rule in ways)
    if first and once:
        return f"{begun} {writer.marks(ends)}"
    part = any_of(f"{free(Ends((mark,)))} {rule}" for mark, rule in ways)
    if once:
        return any_of([f"{part} {writer.marks(ends)}", free(ends)])
    return f"{begun if first else ''} {part}* {free(ends)}"
