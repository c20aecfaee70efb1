"""Tools: the functions that a request offers, and which of them the model may or must call."""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.structured.compiled import MOST_KEPT
from nanovllm.structured.schema_errors import explained
from nanovllm.structured.schemas import check_schema, without_neutral
from nanovllm.utils.checks import (
    allowed_choices,
    as_list,
    check_bool,
    check_name,
    did_you_mean,
    shorten,
)

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# transformers adds `return` to the description of a Python function.
FIELDS = ("name", "description", "parameters", "strict", "return")
MOST_LISTED = 50  # names in an error
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function's name, and the JSON schema of its arguments, which is the schema of an object.

    If it is `strict`, its arguments always fit the schema, even if the model decides to call it.
    `types` has the JSON types of the parameters that answers have had so far, by their names.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    types: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that may be called. If `required`, the answer is a call, or `several` calls.

    If not `asked`, calls are read only if it is known how the model writes them. They are a `part`
    of the tools if the prompt shows others too.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    several: bool = True
    asked: bool = True
    part: bool = False

    @property
    def is_free(self) -> bool:
        """Whether an answer that need not be a call can be any text."""
        return self.several and not self.part and not any(tool.strict for tool in self.tools)


NO_TOOLS = ToolChoice()


def described_tools(tools: Any) -> list[Any] | None:
    """Tools in OpenAI's form; Python functions are converted to descriptions."""
    if tools is None:
        return None
    given = as_list("tools", tools, "a list of tools")
    return [_described(f"tools[{i}]", t) if callable(t) else t for i, t in enumerate(given)]


def _described(place: str, function: Any) -> Any:
    """Describe a function by its signature and its docstring."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # transformers' own kinds
        raise ValueError(f"{place}: {error}") from None


def tool_choice_of(tools: list[Any] | None, choice: Any = None, parallel: Any = None) -> ToolChoice:
    """The choice that `tools`, `tool_choice` and `parallel_tool_calls` of a request ask for."""
    if not tools:
        if choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice is {shorten(choice)}, but there are no tools")
        return NO_TOOLS
    found = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = [tool.name for tool in found]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"tools: the name {name!r} occurs {count} times")
    several = parallel is None or check_bool("parallel_tool_calls", parallel)
    if choice in (None, "auto", "required"):
        return ToolChoice(tuple(found), choice == "required", several, choice is not None)
    if choice == "none":
        return NO_TOOLS
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed, required = allowed_tools(choice)
        some = tuple(found[_place(name, names)] for name in dict.fromkeys(allowed))
        is_part = len(some) < len(found)
        return ToolChoice(some, required, several, part=is_part)
    chosen = found[_place(_chosen(choice), names)]
    return ToolChoice((chosen,), required=True, several=False)


def _place(name: str, names: list[str]) -> int:
    """The place of a tool that `tool_choice` names."""
    if name not in names:
        hint = did_you_mean(name, names) or f"; there are {_listed(names)}"
        raise ValueError(f"tool_choice: there is no tool {shorten(name)}{hint}")
    return names.index(name)


def allowed_tools(choice: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The names in a `tool_choice` of allowed tools, and whether one of them must be called.

    The mode and the tools may stand in an object `allowed_tools`, as in chats, or next to the type.
    """
    inner = choice.get("allowed_tools", choice)
    mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
    tools = inner.get("tools") if isinstance(inner, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise ValueError(
            'tool_choice must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or'
            f' "required", "tools": [{{"type": "function", ...}}, ...]}}}}, got {shorten(choice)}'
        )
    return [_allowed(tool) for tool in tools], mode == "required"


def _allowed(tool: Any) -> str:
    """The name of an allowed tool, which may stand in an object `function`."""
    is_flat = isinstance(tool, Mapping) and "function" not in tool
    return _chosen({"function": tool} if is_flat else tool)


def _listed(names: list[str]) -> str:
    """The names in words, or the first ones of many."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _tool(place: str, given: Any) -> Tool:
    """Check a tool as OpenAI writes it: a type and a function."""
    if not isinstance(given, Mapping) or not isinstance(given.get("function"), Mapping):
        raise TypeError(
            f'{place} must be {{"type": "function", "function": {{...}}}}, got {shorten(given)}'
        )
    if given.get("type", "function") != "function":
        raise ValueError(f"{place}.type must be 'function', got {shorten(given['type'])}")
    function = given["function"]
    for name in function:
        check_name(name, FIELDS, f"{place}.function: ")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{place}.function.name must be 1 to 128 letters, digits and _.:/-, got {shorten(name)}"
        )
    strict = function.get("strict")
    return Tool(
        name=name,
        parameters=_parameters(f"{place}.function.parameters", parameters),
        strict=strict is not None and check_bool(f"{place}.function.strict", strict),
    )


def _parameters(place: str, schema: Any) -> Mapping[str, Any]:
    """Check the schema of a function's arguments; one without any has none."""
    if schema is None or schema == {}:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise TypeError(f"{place} must be a JSON schema, a dict, got {shorten(schema)}")
    if schema.get("type", "object") != "object":
        raise ValueError(f"{place} must be a schema of an object, got {shorten(schema['type'])}")
    return {"type": "object", **schema}


def _chosen(choice: Any) -> str:
    """The name in a `tool_choice` of one function."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'tool_choice must be {allowed_choices(CHOICES)} or {{"type": "function", "function":'
            f' {{"name": ...}}}}, got {shorten(choice)}'
        )
    name: str = function["name"]
    return name


def checked_parameters(tool: Tool) -> Mapping[str, Any]:
    """A tool's schema, for a constraint; an unsupported schema is a ValueError."""
    try:
        check_schema(tool.parameters)
        error = _schema_error(json.dumps(tool.parameters))
    except (TypeError, ValueError) as raised:
        error = str(raised)
    if error:
        raise ValueError(f"the parameters of the tool {tool.name!r}: {error}")
    return tool.parameters


@functools.lru_cache(MOST_KEPT)
def _schema_error(text: str) -> str:
    """Why there is no grammar of a schema, or ""."""
    return explained("", [("#", without_neutral(json.loads(text)))])
