"""HarmonyReader: divides the messages of an answer into reasoning, content and tool calls."""

from collections.abc import Callable, Generator, Iterable

from nanovllm.chat.harmony.header import Header
from nanovllm.chat.harmony.marked_text import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, Piece
from nanovllm.chat.tool_formats.json_reader import read_arguments
from nanovllm.chat.tool_formats.parser import Delta
from nanovllm.chat.tool_formats.source import Source

GAP = "\n\n"  # between the bodies of two messages
Calls = Generator[None, None, None]


class HarmonyReader:
    """Takes the pieces of an answer. The joined deltas do not depend on the division into pieces.

    Analysis is reasoning, and so is a message of another author than the assistant; other messages
    are content. A message to a tool is a call, if `reads_calls` and its body is a JSON object; it
    is reported when the object is complete, or if `early` as soon as it begins. If it is then cut
    off, it stays a call, and only the rest is content. Another message to a tool keeps its header,
    if it is content. Without `reads_calls` there are no calls, without `reasons` no reasoning.
    """

    def __init__(
        self, new_id: Callable[[], str], *, reads_calls: bool, reasons: bool, early: bool
    ) -> None:
        self._new_id, self._early = new_id, early
        self._reads_calls, self._reasons = reads_calls, reasons
        self._header: Header | None = Header(follows_author=True)  # None: in a body
        self._call: Calls | None = None  # reads the body, if it may be a call
        self._source = Source()  # of the call
        self._is_hidden = self._is_blank = self._is_closed = False
        self._is_new = True  # nothing of this body is reported
        self._has_said = {False: False, True: False}  # content, reasoning
        self._num_calls = 0
        self._deltas: list[Delta] = []

    def feed(self, pieces: Iterable[Piece], ended: bool = False) -> list[Delta]:
        """The deltas that these pieces make certain."""
        for text, is_marker in pieces:
            if is_marker:
                self._mark(text)
            else:
                self._add(text)
        if ended:
            self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    def begin_after(self, pieces: Iterable[Piece]) -> None:
        """Begin after these pieces of the prompt, which follow its last `<|start|>`."""
        self._header = Header()
        self.feed(pieces)
        if self._header is not None and self._header.written.strip() == "assistant":
            self._header = Header(follows_author=True)
        self._call, self._is_new, self._num_calls = None, self._header is not None, 0
        self._has_said = {False: False, True: False}

    @property
    def is_in_header(self) -> bool:
        """Whether a header goes on, and no body."""
        return self._header is not None

    def _mark(self, mark: str) -> None:
        """Take a special token; one that has no meaning here is dropped."""
        if mark in ENDS or mark == START:
            self._is_closed = True
            self._close()
            self._header = Header()
        elif mark == CHANNEL or (mark == CONSTRAIN and self._header is not None):
            if self._header is None:  # the end of the last body is missing
                self._close()
                self._header = Header()
            self._header.add_mark(mark)
        elif mark == MESSAGE and self._header is not None:
            header, self._header = self._header, None
            self._open(header)

    def _add(self, text: str) -> None:
        if self._header is not None:
            text = self._header.add_text(text)
            if self._header.is_text:
                self._say_header(self._header)
        if text and self._call is not None:
            self._source.add(text)
            self._go_on()
        elif text:
            self._say(text)

    def _say_header(self, header: Header) -> None:
        """Report a header that is none as the body of a message."""
        self._header, self._is_new, self._is_blank = None, True, False
        self._is_hidden = header.channel == "analysis" and self._reasons
        self._say(header.body)

    def _open(self, header: Header) -> None:
        """Begin a body."""
        self._is_new, self._is_blank, self._is_closed = True, False, False
        self._is_hidden = header.is_hidden and self._reasons
        if header.called and self._reads_calls:
            self._source = Source()
            self._call = self._read_call(header)
            next(self._call)
        elif header.called:
            self._say_unread(header, "")

    def _close(self) -> None:
        """End a body, or a header without a body."""
        if self._header is not None and self._header.body:
            self._say_header(self._header)
        if self._call is not None:
            self._source.ended = True
            self._go_on()

    def _go_on(self) -> None:
        """Read on in a call."""
        assert self._call is not None
        if next(self._call, self) is self:
            self._call = None

    def _read_call(self, header: Header) -> Calls:
        """Read the body of a message to a tool."""
        source, parts, name = self._source, list[str](), header.called
        yield  # begun
        yield from source.skip_space()
        if not (yield from source.has_more()) and self._is_closed:  # no arguments
            self._report(name, ["{}"])
            return
        found, is_object = False, source.text.startswith("{", source.at)
        if is_object and self._early:
            self._report(name, [])
        reading = read_arguments(source)
        while is_object:
            try:
                part = next(reading)
            except StopIteration as stop:
                found = stop.value
                break
            if part is None:
                yield
            elif self._early:
                self._deltas.append(Delta(call=self._num_calls - 1, arguments=part.arguments))
            else:
                parts.append(part.arguments)
        if found and not self._early:
            self._report(name, parts)
        if found or (is_object and self._early):
            self._is_hidden, self._is_blank = False, found
            self._say(source.text[source.at :])
        else:
            self._say_unread(header, source.text)

    def _report(self, name: str, arguments: list[str]) -> None:
        """Report a call."""
        index = self._num_calls
        self._num_calls += 1
        self._deltas.append(Delta(call=index, call_id=self._new_id(), name=name))
        self._deltas += [Delta(call=index, arguments=part) for part in arguments]

    def _say_unread(self, header: Header, body: str) -> None:
        """Report a message to a tool that is no call."""
        self._say(body if self._is_hidden else f"{header.call}{MESSAGE}{body}")

    def _say(self, text: str) -> None:
        """Report a part of a body; white space after a call is left out."""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        if not text:
            return
        if self._is_new and self._has_said[self._is_hidden]:
            text = GAP + text
        self._is_new, self._has_said[self._is_hidden] = False, True
        self._deltas.append(Delta(reasoning=text) if self._is_hidden else Delta(content=text))
