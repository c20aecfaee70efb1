"""Find how formats begin, and whether they have an end of their own.

A format without an end of its own ends where the next format begins.
"""

import itertools
from typing import Any

from nanovllm.structured.structural_tags.formats import Format, Mark, as_list, kind_of, listed
from nanovllm.structured.structural_tags.writer import GrammarWriter


def is_open(place: str, node: Any) -> bool:
    """Whether the format has no end of its own, or need not have one."""
    kind = kind_of(place, node)
    if kind == "sequence":
        return is_open(*elements_of(place, node)[-1])
    if kind == "or":
        return any(is_open(*item) for item in elements_of(place, node))
    if kind == "optional" or (kind == "tag" and "" in as_list(node["end"])):
        return is_open(f"{place}/content", node["content"])
    if kind in ("triggered_tags", "token_triggered_tags"):
        return not (node.get("at_least_one") and node.get("stop_after_first"))
    return kind in ("regex", "any_text", "any_tokens", "dispatch", "token_dispatch")


def heads_of(writer: GrammarWriter, place: str, node: Any) -> list[tuple[Mark, Format | None]]:
    """The marks that the format may begin with, and the rest after each; [] without such marks."""
    kind = kind_of(place, node)
    if kind == "const_string" and isinstance(node["value"], str) and node["value"]:
        return [(node["value"], None)]
    if kind == "token":
        return [(writer.mark_of(place, node), None)]
    if kind == "tag" and node["begin"] != "":
        return [(writer.mark_of(f"{place}/begin", node["begin"]), {**node, "begin": ""})]
    if kind == "sequence":
        first, *others = elements_of(place, node)
        found = heads_of(writer, *first)
        return [(mark, _joined(rest, [other for _, other in others])) for mark, rest in found]
    if kind == "or":
        all_heads = [heads_of(writer, *item) for item in elements_of(place, node)]
        return [*itertools.chain(*all_heads)] if all(all_heads) else []
    return []


def elements_of(place: str, node: Format) -> list[tuple[str, Any]]:
    """The formats of a sequence or a choice, with their places."""
    elements = listed(f"{place}/elements", node["elements"], dict)
    return [(f"{place}/elements/{i}", one) for i, one in enumerate(elements)]


def _joined(first: Format | None, others: list[Format]) -> Format | None:
    """A sequence of these formats; None if there are none."""
    elements = ([] if first is None else [first]) + others
    return {"type": "sequence", "elements": elements} if elements else None
