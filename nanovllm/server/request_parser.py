"""RequestParser: the requests in a client's bytes, with limits on all that is not a body."""

from typing import NamedTuple, NoReturn, Protocol
from urllib.parse import unquote

import httptools

from nanovllm.server.errors import APIError
from nanovllm.server.limits import Limits

Headers = list[tuple[bytes, bytes]]  # names are in lower case
KIB = 1 << 10
FRAMING = (b"content-length", b"transfer-encoding")  # headers that say where a body ends
READ = frozenset((b"host", b"transfer-encoding", b"expect"))  # headers that are read here


class Head(NamedTuple):
    """What a request begins with."""

    version: str
    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    keep_alive: bool  # another request may follow
    wants_continue: bool  # its body comes when it is asked for

    @property
    def path(self) -> str:
        """The path without escapes."""
        return unquote(self.raw_path.decode())


class Reader(Protocol):
    """What is told of requests, in this order."""

    def begin_request(self) -> bool:
        """Whether one more request may be read."""

    def take_head(self, head: Head) -> None:
        """Take the head of the request."""

    def take_body(self, body: bytes) -> None:
        """Take a part of its body."""

    def end_request(self) -> None:
        """The request is complete."""


class RequestParser:
    """Parses requests until `is_over`; what comes after is dropped."""

    def __init__(self, limits: Limits, reader: Reader) -> None:
        self._limits, self._reader = limits, reader
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers = b"", Headers()
        self._num_parsed = 0  # bytes of a request that are not of its body
        self._num_unparsed = 0  # bytes that came since the parser last had a result
        self._error: APIError | None = None  # why a callback has stopped the parser
        self._is_upgrade = self._is_replay = False
        self.in_head = False  # a request has begun, and its headers have not ended
        self.is_over = self.has_dropped = False

    def feed(self, data: bytes) -> None:
        """Parse more; an APIError if the client's bytes are not, or must not be, a request."""
        if self.is_over:
            self.has_dropped = True
            return
        self._num_unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_as_http(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.has_dropped = True
            if not self.is_over:  # else this comes after the last request
                self._fail(error)
        if self._num_unparsed > self._limits.max_header_kib * KIB and not self.is_over:
            raise self._too_large()

    def end(self) -> None:
        """Drop what refers to this object: without cycles it is freed at once."""
        self.is_over, self._error = True, None
        del self._parser, self._reader

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, httptools.HttpParserInvalidMethodError):
            raise APIError(501, "the request's method is unknown", "unknown_method") from None
        raise self._error or APIError(400, f"the request is not valid HTTP: {error}") from None

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_replay:
            return
        if self.is_over or not self._reader.begin_request():
            self.is_over = True
            raise ValueError  # which stops the parser
        self._url, self._headers = b"", []
        self.in_head, self._num_parsed = True, 0

    def on_url(self, url: bytes) -> None:
        if not self._is_replay:
            self._count(len(url))
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replay:
            return
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self.in_head:  # else it comes after the body, and says nothing that is needed
            self._headers.append((name.lower(), value.rstrip(b" \t")))
            if len(self._headers) > (most := self._limits.max_headers):
                self._stop(431, f"a request must have at most {most} headers (max_headers)")

    def on_headers_complete(self) -> None:
        if self._is_replay:
            return
        parser = self._parser
        version = parser.get_http_version()
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            self._stop(400, "the target of a request must be a path")
        self._is_upgrade = parser.should_upgrade()
        is_new = version == "1.1"
        known = [one for one in self._headers if one[0] in READ]
        self._check(version, known)
        head = Head(
            version, parser.get_method().decode(), url.path or b"/", url.query or b"",
            self._headers, is_new and parser.should_keep_alive(),
            is_new and b"100-continue" in _values(known, b"expect"),
        )  # fmt: skip
        self.in_head = False
        self._reader.take_head(head)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        self._reader.take_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade:  # else its body has not been read
            self._num_unparsed = 0
            self._reader.end_request()

    # Limits.

    def _count(self, number: int) -> None:
        """Count bytes of the headers of a request, or of what follows its body."""
        self._num_unparsed = 0
        self._num_parsed += number
        if self._num_parsed > self._limits.max_header_kib * KIB:
            self._error = self._too_large()
            raise self._error

    def _too_large(self) -> APIError:
        most = self._limits.max_header_kib
        words = f"the headers of a request must have at most {most} KiB (max_header_kib)"
        return APIError(431, words, "headers_too_large")

    def _stop(self, status: int, message: str) -> NoReturn:
        """Refuse a request from inside of a callback."""
        self._error = APIError(status, message)
        raise self._error  # which stops the parser

    def _check(self, version: str, headers: Headers) -> None:
        """Refuse a request if it is not clear where it ends, or for which host it is."""
        if version not in ("1.0", "1.1"):
            self._stop(505, "the server speaks HTTP/1.1 and HTTP/1.0")
        num_hosts = len(_values(headers, b"host"))
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._stop(400, f"a request must have one Host header, got {num_hosts}")
        encodings = _values(headers, b"transfer-encoding")
        if encodings and (encodings != [b"chunked"] or version == "1.0"):
            self._stop(501, "transfer-encoding must be chunked, and needs HTTP/1.1")

    def _read_as_http(self, rest: bytes) -> None:
        """Read a request that asks for another protocol as one that does not.

        The parser ends behind its headers. A new one reads the body, and needs to know how.
        """
        self._parser, self._is_upgrade = httptools.HttpRequestParser(self), False
        framing = [header for header in self._headers if header[0] in FRAMING]
        lines = b"".join(b"%b: %b\r\n" % header for header in framing)
        self._is_replay = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
        self._is_replay = False
        if rest:
            self.feed(rest)


def _values(headers: Headers, name: bytes) -> list[bytes]:
    """The values of a header, in lower case."""
    return [value.lower() for other, value in headers if other == name]
