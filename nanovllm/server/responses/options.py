"""Tools, formats and reasoning of a response's request, in the form of chats."""

from typing import Any

from nanovllm.server.chats.fields import check_fixed, given_fields, kind_of, list_in

TOOL = ("type", "name", "description", "parameters", "strict")
FORMATS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "description", "schema", "strict"),
}


def chat_tool(tool: Any, place: str) -> dict[str, Any]:
    """A function in the form of chats."""
    kind_of(tool, place, ("function",))
    given = given_fields(tool, TOOL, {}, place)
    return {"type": "function", "function": {k: v for k, v in given.items() if k != "type"}}


def chat_choice(choice: Any) -> Any:
    """A `tool_choice` in the form of chats, which checks texts."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = kind_of(choice, "tool_choice", ("function", "allowed_tools"))
    if kind == "function":
        given = given_fields(choice, ("type", "name"), {}, "tool_choice")
        return {"type": kind, "function": {"name": given.get("name")}}
    given = given_fields(choice, ("type", "mode", "tools"), {}, "tool_choice")
    tools = [chat_choice(tool) for tool in list_in(given.get("tools"), "tool_choice.tools")]
    return {"type": kind, kind: {"mode": given.get("mode"), "tools": tools}}


def response_format(text: Any) -> dict[str, Any] | None:
    """The `response_format` of a chat with this `text`."""
    given = given_fields({} if text is None else text, ("format", "verbosity"), {}, "text")
    why = "say in the instructions how long answers are"
    check_fixed(given, {"verbosity": ("medium", why)}, "text.")
    if "format" not in given:
        return None
    kind = kind_of(given["format"], "text.format", tuple(FORMATS))
    described = given_fields(given["format"], FORMATS[kind], {}, "text.format")
    if kind != "json_schema":
        return described
    if "schema" not in described:
        raise ValueError("text.format.schema is missing")
    return {"type": kind, kind: {k: v for k, v in described.items() if k != "type"}}


def effort_of(reasoning: Any) -> Any:
    """The reasoning effort, which a chat passes to its template."""
    why = "the reasoning itself is in the items of type reasoning"
    refused = {"summary": why, "generate_summary": why}
    given = given_fields({} if reasoning is None else reasoning, ("effort",), refused, "reasoning")
    return given.get("effort")
