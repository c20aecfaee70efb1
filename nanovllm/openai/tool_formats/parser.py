"""ToolParser: divides an answer into content and tool calls, whole or piece by piece."""

from collections.abc import Generator
from typing import NamedTuple

from nanovllm.openai.tool_formats.base import Part, ToolFormat
from nanovllm.openai.tool_formats.source import Source, overlap


class Delta(NamedTuple):
    """A new part of an answer: content, or a part of the call with the index `call`.

    A call's first delta has its id and its name, the later ones pieces of its arguments.
    """

    content: str = ""
    call: int | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Deltas = Generator[Delta | None, None, None]  # None: more text is needed


class ToolParser:
    """Takes an answer in pieces. What the deltas join to does not depend on the pieces.

    A call is reported when all of it is there and well-formed. Other text is content, except white
    space beside a call. If `early`, a call is reported as soon as its name and the start of its
    arguments are there; if it then breaks off it stays a call, and only the rest is content.
    """

    def __init__(self, tool_format: ToolFormat, early: bool = False) -> None:
        self._format = tool_format
        self._early = early
        self._source = Source()
        self._deltas = self._run()
        self._num_calls = 0
        self._space = ""  # content that is dropped if a call follows
        self._is_after_call = False

    def feed(self, text: str) -> list[Delta]:
        """The deltas that one more piece of the answer makes certain."""
        self._source.text += text
        return self._collect()

    def finish(self) -> list[Delta]:
        """The rest: no more text comes."""
        self._source.ended = True
        return self._collect()

    def _collect(self) -> list[Delta]:
        found = []
        for delta in self._deltas:
            if delta is None:
                break
            found.append(delta)
        return found

    def _run(self) -> Deltas:
        source, marker = self._source, self._format.marker
        if self._format.first:
            yield from source.skip_space()
            self._space = source.text[: source.at]
            if (yield from source.has_more()) and source.text[source.at] == self._format.first:
                yield from self._calls()
        while (yield from self._content()):
            begin = source.at
            yield from self._calls()
            if source.at == begin:  # no call: the marker is content
                source.at += len(marker)
                yield from self._say(marker)
        if self._space:
            yield Delta(content=self._space)

    def _content(self) -> Generator[Delta | None, None, bool]:
        """Report content up to the next marker; whether there is one."""
        source, marker = self._source, self._format.marker
        while True:
            place = source.text.find(marker, source.at) if marker else -1
            rest = source.text[source.at :]
            end = place if place >= 0 else len(source.text)
            if place < 0 and not source.ended:
                end -= overlap(rest, marker)
            begin, source.at = source.at, end
            yield from self._say(source.text[begin:end])
            if place >= 0 or source.ended:
                return place >= 0
            source.drop_read()
            yield None

    def _say(self, text: str) -> Deltas:
        """Report content; hold back the white space at its end."""
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            yield Delta(content=content)

    def _calls(self) -> Deltas:
        """Report the calls that begin here; leave the place behind what was reported."""
        source, held = self._source, list[Part]()
        reported = source.at
        for part in self._format.read(source):
            if part is None:
                yield None
                continue
            if not part.is_whole:
                held.append(part)
            if self._early or part.is_whole:
                yield from map(self._report, held)
                held.clear()
                reported = source.at
        source.at = reported

    def _report(self, part: Part) -> Delta:
        self._space, self._is_after_call = "", True
        if part.name:
            self._num_calls += 1
            call_id = part.call_id or self._format.new_id()
            return Delta(call=self._num_calls - 1, call_id=call_id, name=part.name)
        return Delta(call=self._num_calls - 1, arguments=part.arguments)


class ToolCall(NamedTuple):
    """A call; `arguments` is the JSON text that the model wrote."""

    call_id: str
    name: str
    arguments: str


def parse(tool_format: ToolFormat, text: str) -> tuple[str, list[ToolCall]]:
    """The content and the well-formed calls of a whole answer."""
    parser = ToolParser(tool_format)
    return join([*parser.feed(text), *parser.finish()])


def join(deltas: list[Delta]) -> tuple[str, list[ToolCall]]:
    """The content and the calls that deltas add up to."""
    content, calls = "", list[ToolCall]()
    for delta in deltas:
        content += delta.content
        if delta.name:
            calls.append(ToolCall(delta.call_id, delta.name, ""))
        elif delta.call is not None:
            last = calls[delta.call]
            calls[delta.call] = last._replace(arguments=last.arguments + delta.arguments)
    return content, calls
