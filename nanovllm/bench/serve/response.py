"""ResponseReader: one response of HTTP/1.1, read from bytes as they arrive. It knows no sockets."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_HEAD = 64 * 1024  # bytes of status line and headers
MAX_SIZE_LINE = 1024  # bytes of the line before a chunk
WITHOUT_BODY = (204, 304)


class BadResponseError(ValueError):
    """The server's data is not a response of HTTP/1.1, or ends too early."""


@dataclass(frozen=True)
class Head:
    """Status line and headers; the names of headers are in lower case."""

    version: str
    status: int
    reason: str
    headers: dict[str, str]

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be used again after this response."""
        connection = self.headers.get("connection", "").lower()
        return connection != "close" if self.version == "HTTP/1.1" else connection == "keep-alive"


def parse_head(data: bytes) -> Head:
    """Parse a status line and headers."""
    status_line, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    status, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not (len(status) == 3 and status.isdecimal()):
        raise BadResponseError(f"not a response of HTTP/1.1: {status_line[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadResponseError(f"not a header of HTTP: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    return Head(version, int(status), reason, headers)


class ResponseReader:
    """Reads one response. `head` is None until it has arrived; `is_done` after the end."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.is_done = False
        self._buffer = b""  # data that has arrived and is not read yet
        self._left = 0  # bytes of a body with a known length that have not arrived
        self._read: Callable[[bytes], bytes] = self._read_head

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body that `data` completes."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        return self._read(data)

    def end(self) -> None:
        """The server has closed the connection: raise unless this ends the response."""
        if self.head is None:
            raise BadResponseError("the server closed the connection before its answer")
        if not self.is_done and self._read != self._read_rest:
            raise BadResponseError("the server closed the connection in the middle of its answer")
        self.is_done = True

    def _read_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                raise BadResponseError(f"the headers have more than {MAX_HEAD} bytes")
            self._buffer = data
            return b""
        head, data = parse_head(data[:end]), data[end + 4 :]
        if 100 <= head.status < 200:  # an interim response, before the final one
            return self._read_head(data)
        self.head, self._read = head, self._body_reader(head)
        return b"" if self.is_done else self._read(data)

    def _body_reader(self, head: Head) -> Callable[[bytes], bytes]:
        """The function that reads the body, by the headers that say where it ends."""
        if head.status in WITHOUT_BODY:
            self.is_done = True
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._read_chunks
        length = head.headers.get("content-length")
        if length is None:
            return self._read_rest
        if not length.isdecimal():
            raise BadResponseError(f"content-length must be a number, got {length!r}")
        self._left = int(length)
        return self._read_length

    def _read_length(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        self.is_done = self._left == 0
        return body

    def _read_rest(self, data: bytes) -> bytes:
        return data  # until the connection is closed

    def _read_chunks(self, data: bytes) -> bytes:
        """The bodies of all complete chunks."""
        bodies, at = [], 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size, start = _chunk_size(data[at:line_end]), line_end + 2
            if size == 0:  # the last one; trailers may follow
                self.is_done = data.find(b"\r\n\r\n", line_end) >= 0
                break
            end = start + size
            if len(data) < end + 2:
                break
            if data[end : end + 2] != b"\r\n":
                raise BadResponseError("a chunk is longer than its size says")
            bodies.append(data[start:end])
            at = end + 2
        else:
            if len(data) - at > MAX_SIZE_LINE:
                raise BadResponseError("a chunk has no size")
        self._buffer = data[at:]
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)


def _chunk_size(line: bytes) -> int:
    """The size in the line before a chunk, which may have extensions."""
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError:
        size = -1
    if size < 0:
        raise BadResponseError(f"not the size of a chunk: {line[:80]!r}")
    return size
