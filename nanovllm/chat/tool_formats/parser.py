"""ToolParser: divides an answer into content and tool calls, whole or piece by piece."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from nanovllm.chat.tool_formats.base import Part, ToolFormat
from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool


class Delta(NamedTuple):
    """A new part of an answer: content, reasoning, or a part of the call with the index `call`.

    A call's first delta has its id and its name, the later ones pieces of its arguments.
    """

    content: str = ""
    call: int | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    reasoning: str = ""


MOST_FAILED = 1 << 22  # characters that calls may have looked at without being well-formed

Deltas = Generator[Delta | None, None, None]  # None: more text is needed


class ToolParser:
    """Takes an answer in pieces. The joined deltas do not depend on the division into pieces.

    A call is reported when it is complete and well-formed. Other text is content, except white
    space next to a call. If `early`, a call is reported as soon as its name and the start of its
    arguments are there; if it is then cut off, it stays a call, and only the rest is content.

    If a call is cut off at the end of the answer, no other call is searched after its marker; nor
    if calls that are not well-formed have looked at MOST_FAILED characters, each at the same ones.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool], early: bool = False) -> None:
        self._format = tool_format
        self._tools = tools
        self._early = early
        self._source = Source()
        self._deltas = self._run()
        self._num_calls = 0
        self._space: list[str] = []  # content that is dropped if a call follows
        self._is_after_call = False
        self._num_failed = 0  # characters that calls have looked at without being well-formed

    def feed(self, text: str) -> list[Delta]:
        """The deltas that one more piece of the answer makes certain."""
        self._source.add(text)
        return self._collect()

    def finish(self) -> list[Delta]:
        """The remaining deltas, after the end of the text."""
        self._source.ended = True
        return self._collect()

    def _collect(self) -> list[Delta]:
        found = itertools.takewhile(lambda delta: delta is not None, self._deltas)
        return [*_merged(delta for delta in found if delta is not None)]

    def _run(self) -> Deltas:
        source, marker = self._source, self._format.marker
        if self._format.first:
            yield from source.skip_space()
            self._space = [source.text[: source.at]]
            if (yield from source.has_more()) and source.text[source.at] == self._format.first:
                yield from self._calls()
        while (yield from self._content()):
            begin = source.at
            gives_up = yield from self._calls()
            if source.at == begin:  # not a call: the marker is content
                source.at += len(marker)
                yield from self._say(marker)
            if gives_up:  # other markers in it are not tried: each could take all of the rest
                break
        yield from self._say(source.text[source.at :])
        if space := "".join(self._space):
            yield Delta(content=space)

    def _content(self) -> Generator[Delta | None, None, bool]:
        """Report content up to the next marker; returns whether there is one."""
        source, marker = self._source, self._format.marker
        while True:
            begin, source.at = source.at, source.find(marker)
            yield from self._say(source.text[begin : source.at])
            if source.text.startswith(marker, source.at):
                return True
            if source.ended:
                return False
            source.drop_read()
            yield None

    def _say(self, text: str) -> Deltas:
        """Report content; hold back the white space at its end."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        content = text.rstrip()
        if content:
            yield Delta(content="".join([*self._space, content]))
            self._space = []
        if len(content) < len(text):
            self._space.append(text[len(content) :])

    def _calls(self) -> Generator[Delta | None, None, bool]:
        """Report the calls that begin here, and move the place after them.

        Returns whether no other calls are to be searched: these are cut off at the end of the
        answer, or too much text was looked at in vain.
        """
        source, waiting = self._source, list[Part]()
        reported = source.at
        for part in self._format.read(source, self._tools):
            if part is None:
                yield None
                continue
            if not part.is_whole:
                waiting.append(part)
            if self._early or part.is_whole:
                yield from map(self._report, waiting)
                waiting.clear()
                reported = source.at
        is_at_end = source.ended and source.at == len(source.text)
        num_failed = source.at - reported
        source.at, self._num_failed = reported, self._num_failed + num_failed
        return (is_at_end and num_failed > 0) or self._num_failed > MOST_FAILED

    def _report(self, part: Part) -> Delta:
        self._space, self._is_after_call = [], True
        if part.name:
            self._num_calls += 1
            call_id = part.call_id or self._format.new_id()
            return Delta(call=self._num_calls - 1, call_id=call_id, name=part.name)
        return Delta(call=self._num_calls - 1, arguments=part.arguments)


def _merged(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Merge consecutive deltas of the same content or arguments into one."""
    for _, group in itertools.groupby(deltas, lambda delta: (delta.call, delta.name)):
        first, *others = group
        content = "".join([first.content, *(delta.content for delta in others)])
        arguments = "".join([first.arguments, *(delta.arguments for delta in others)])
        yield first._replace(content=content, arguments=arguments)


class ToolCall(NamedTuple):
    """A call; `arguments` is the JSON text that the model wrote."""

    call_id: str
    name: str
    arguments: str


def parse(tool_format: ToolFormat, tools: Sequence[Tool], text: str) -> tuple[str, list[ToolCall]]:
    """The content and the well-formed calls of a whole answer."""
    parser = ToolParser(tool_format, tools)
    return join([*parser.feed(text), *parser.finish()])


def join(deltas: Iterable[Delta]) -> tuple[str, list[ToolCall]]:
    """Join deltas to content and calls."""
    content, heads, arguments = list[str](), list[Delta](), list[list[str]]()
    for delta in deltas:
        content.append(delta.content)
        if delta.name:
            heads.append(delta)
            arguments.append([])
        elif delta.call is not None:
            arguments[delta.call].append(delta.arguments)
    calls = [
        ToolCall(head.call_id, head.name, "".join(pieces))
        for head, pieces in zip(heads, arguments, strict=True)
    ]
    return "".join(content), calls
