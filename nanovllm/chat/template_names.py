"""What a chat template reads of messages: which fields by their names, and whether all of them."""

import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.chat.template_fields import parsed_template

if TYPE_CHECKING:
    from jinja2 import nodes

WRITERS = ("tojson", "items", "dictsort", "string", "pprint")  # filters that take all
SAME = ("list", "reverse", "first", "last", "selectattr", "rejectattr")  # filters of messages
LISTS = ("items", "keys", "values")  # methods of an object that take all
# Filters whose arguments are names of fields.
CHOOSERS = (
    "attr", "map", "selectattr", "rejectattr", "groupby", "sort", "unique", "sum", "min", "max",
)  # fmt: skip


@functools.lru_cache(16)
def names_in(template: str) -> frozenset[Any]:
    """The attributes and the items that a template reads of anything."""
    from jinja2 import nodes

    parsed = parsed_template(template)
    if parsed is None:
        return frozenset(re.findall(r"\w+", template))
    attributes = {node.attr for node in parsed.find_all(nodes.Getattr)}
    items = {one.value for one in _items(parsed) if isinstance(one, nodes.Const)}
    return frozenset(attributes | items)


def _items(parsed: "nodes.Template") -> Iterator[Any]:
    """The expressions in places where names of items are."""
    from jinja2 import nodes

    for item in parsed.find_all(nodes.Getitem):
        yield item.arg
    for compared in parsed.find_all(nodes.Compare):
        if compared.ops[0].op in ("in", "notin"):
            yield compared.expr
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get":
            yield from call.args[:1]
    for chosen in parsed.find_all(nodes.Filter):
        if chosen.name in CHOOSERS:
            yield from (*chosen.args, *(keyword.value for keyword in chosen.kwargs))
    for loop in parsed.find_all(nodes.For):  # over names, by which the items are read
        if isinstance(loop.iter, nodes.List | nodes.Tuple):
            yield from loop.iter.items


@functools.lru_cache(16)
def reads_whole(template: str) -> bool:
    """Whether a template reads all fields of a message, such as `message | tojson`."""
    from jinja2 import nodes

    parsed = parsed_template(template)
    if parsed is None:
        return False
    names = _message_names(parsed)
    filtered = (one.node for one in parsed.find_all(nodes.Filter) if one.name in WRITERS)
    called = (
        one.node.node
        for one in parsed.find_all(nodes.Call)
        if isinstance(one.node, nodes.Getattr) and one.node.attr in LISTS
    )
    written = (one for output in parsed.find_all(nodes.Output) for one in output.nodes)
    return any(_root(one) in names for one in (*filtered, *called, *written))


def _message_names(parsed: "nodes.Template") -> set[str]:
    """The variables that are a message or messages."""
    from jinja2 import nodes

    names = {"messages"}
    bound = [(one.target, one.iter) for one in parsed.find_all(nodes.For)]
    bound += [(one.target, one.node) for one in parsed.find_all(nodes.Assign)]
    for _ in bound:
        found = {t.name for t, of in bound if isinstance(t, nodes.Name) and _root(of) in names}
        if found <= names:
            break
        names |= found
    return names


def _root(node: Any) -> str | None:
    """The variable of which an expression is a part, a message of several; None for a field."""
    from jinja2 import nodes

    while isinstance(node, nodes.Getitem | nodes.Filter):
        if isinstance(node, nodes.Filter):
            is_part = node.name in SAME
        else:
            is_part = not (isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str))
        if not is_part:
            return None
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None
