"""What a bad client sends: bodies, heads and half requests, each by a name.

Each attack is made once, as bytes, so that the client that sends it again and again costs little.
"""

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20


@dataclass(frozen=True)
class Attack:
    """Bytes to send on a new connection, `pieces` of them; `at_once` connections at a time.

    After the last piece the answer is read to its end; or for at most `wait` seconds, if given,
    and nothing is read at all unless `reads`.
    """

    pieces: Callable[[], Iterator[bytes]]
    at_once: int = 4
    wait: float | None = None
    reads: bool = True


def request(path: str, body: bytes, *headers: str) -> bytes:
    """A whole request."""
    lines = (
        f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close",
        "Content-Type: application/json", f"Content-Length: {len(body)}", *headers, "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + body


def asking(path: str, at_once: int = 4, wait: float | None = None, **fields: Any) -> Attack:
    """An attack by one body of JSON."""
    data = request(path, json.dumps(fields).encode())
    return Attack(lambda: iter((data,)), at_once, wait, reads=wait is None)


def of_text(path: str, text: str, at_once: int = 4) -> Attack:
    """An attack by one body with this text."""
    data = request(path, text.encode())
    return Attack(lambda: iter((data,)), at_once)


def endless_header() -> Iterator[bytes]:
    """One header that does not end."""
    yield b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
    yield from itertools.repeat(b"a" * 65536, 800)


def small_headers() -> Iterator[bytes]:
    """A million headers."""
    yield b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    yield from itertools.repeat(b"".join(b"X%d: %d\r\n" % (i, i) for i in range(4000)), 250)


def three_letters() -> list[str]:
    """Ten thousand texts of three letters that the model does not write."""
    letters = "abcdefghijklmnopqrstuvw"
    return ["".join(three) for three in itertools.product(letters, repeat=3)][:10_000]


def tools(number: int) -> list[dict[str, Any]]:
    """Tools with different names."""
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object"}}}
        for i in range(number)
    ]


def attacks() -> dict[str, Callable[[], Attack]]:
    """All attacks by name, made when they are called."""
    one = {"prompt": "1+1=", "max_tokens": 500, "ignore_eos": True}
    say = [{"role": "user", "content": "1"}]
    wide = {f"p{i}": {"type": "string"} for i in range(8000)}
    return {
        "10,000 stops": lambda: asking(COMPLETIONS, stop=three_letters(), **one),
        "64 stops": lambda: asking(COMPLETIONS, stop=three_letters()[:64], n=16, **one),
        "16 samples with 20 logprobs": lambda: asking(COMPLETIONS, n=16, logprobs=20, **one),
        "512 streams that nobody reads": lambda: asking(
            COMPLETIONS, 16, 3.0, n=32, logprobs=20, stream=True, **one
        ),
        "20 prompt_logprobs of 4,000 tokens": lambda: asking(
            COMPLETIONS, prompt="1" * 4000, prompt_logprobs=20, max_tokens=1
        ),
        "1,000,000 biases": lambda: asking(
            COMPLETIONS, logit_bias={str(i): 1 for i in range(1_000_000)}, **one
        ),
        "400,000 messages": lambda: asking(
            CHAT, messages=[{"role": "user", "content": ""}] * 400_000
        ),
        "5,000,000 token ids": lambda: asking(COMPLETIONS, prompt=[1] * 5_000_000),
        "1,500,000 objects": lambda: asking(COMPLETIONS, what=[{}] * 1_500_000, **one),
        "100,000 brackets": lambda: of_text(COMPLETIONS, '{"prompt": ' + "[" * 100_000),
        "a text of 15 MB": lambda: asking(COMPLETIONS, prompt="1" * 15_000_000),
        "a text of 15 MB, without waiting": lambda: asking(
            COMPLETIONS, 4, 0.1, prompt="1 " * 7_500_000
        ),
        "a chat of 15 MB": lambda: asking(
            CHAT, messages=[{"role": "user", "content": "1 " * 7_500_000}]
        ),
        "names of 2 MB of tokens": lambda: asking(
            "/tokenize", prompt="1 " * MIB, return_token_strs=True
        ),
        "16,000 tools": lambda: asking(CHAT, messages=say, tools=tools(16_000), max_tokens=4),
        "20,000 bad words": lambda: asking(
            COMPLETIONS, bad_words=[f"{i}x" for i in range(20_000)], **one
        ),
        "a forced text of 3,900 characters": lambda: asking(
            COMPLETIONS,
            prompt="1",
            max_tokens=4000,
            structured_outputs={"choice": ["1" * 3900]},
        ),
        "a choice of 50,000 characters": lambda: asking(
            COMPLETIONS, structured_outputs={"choice": ["1" * 50_000]}, **one
        ),
        "after 160,000 characters": lambda: asking(
            COMPLETIONS, structured_outputs={"regex": "1*", "after": "ab" * 80_000}, **one
        ),
        "1,000 samples": lambda: asking(COMPLETIONS, prompt="1" * 3900, n=1000, max_tokens=100),
        "a slow expression": lambda: asking(
            COMPLETIONS, structured_outputs={"regex": "a?" * 60_000}, **one
        ),
        "a schema of 8,000 properties": lambda: asking(
            COMPLETIONS,
            structured_outputs={"json": {"type": "object", "properties": wide}},
            **one,
        ),
        "all ids stop": lambda: asking(
            COMPLETIONS,
            prompt="1",
            min_tokens=1,
            stop_token_ids=[*range(264)],
            structured_outputs={"regex": "a"},
        ),
        "prompts that end at once": lambda: asking(COMPLETIONS, 64, prompt="1" * 200, max_tokens=1),
        "high priority": lambda: asking(COMPLETIONS, 64, priority=-1000, **one),
        "an endless header": lambda: Attack(endless_header),
        "1,000,000 headers": lambda: Attack(small_headers),
        "half requests": lambda: Attack(
            lambda: iter((b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",)), 260, 30.0
        ),
        "a compressed body": lambda: Attack(
            lambda: iter(
                (request(COMPLETIONS, gzip.compress(b" " * 16 * MIB), "Content-Encoding: gzip"),)
            )
        ),
    }
