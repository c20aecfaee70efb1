"""EventReader: the data of server-sent events, read from bytes as they arrive."""


class EventReader:
    """Reads a stream of events. Bytes are kept until a line, and so each character, is complete."""

    def __init__(self) -> None:
        self._buffer = b""  # an incomplete line
        self._data: list[bytes] = []  # the lines of data of an incomplete event

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        lines = data.splitlines(keepends=True)
        # A carriage return at the end may be the first half of a line's end.
        if lines and not lines[-1].endswith(b"\n"):
            self._buffer = lines.pop()
        events = []
        for line in lines:
            content = line.rstrip(b"\r\n")
            if content.startswith(b"data:"):
                self._data.append(content[5:].removeprefix(b" "))
            elif not content and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
