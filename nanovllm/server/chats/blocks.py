"""The blocks of a chat's answer: reasoning, texts and calls, one after another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["reasoning", "text", "call"]
TEXTS: tuple[tuple[str, Kind], ...] = (("reasoning_content", "reasoning"), ("content", "text"))


@dataclass(slots=True)
class Block:
    """A part of an answer. `index` is its place; a call has an id and a name.

    The text of a call is its arguments, as JSON.
    """

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that has come of it."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """A block begins, gets a piece, or is complete."""

    what: Literal["open", "add", "close"]
    block: Block
    piece: str = ""


class BlockReader:
    """Divides an answer's deltas, or its whole message, into blocks. Only the last may be open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Step]:
        """The steps of a delta, or of a message, in the form of OpenAI's chats."""
        calls = list(delta.get("tool_calls", ()))
        if calls and "id" not in calls[0]:  # the rest of a call comes before all that is new
            yield self._add(calls.pop(0)["function"]["arguments"])
        for name, kind in TEXTS:
            if piece := delta.get(name):
                if not self._is_open or self.blocks[-1].kind != kind:
                    yield from self._open(kind)
                yield self._add(piece)
        for call in calls:
            function = call["function"]
            yield from self._open("call", call["id"], function["name"])
            if function["arguments"]:
                yield self._add(function["arguments"])

    def close(self) -> Iterator[Step]:
        """The step that completes the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield Step("close", self.blocks[-1])

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self.close()
        self.blocks.append(Block(kind, len(self.blocks), call_id, name))
        self._is_open = True
        yield Step("open", self.blocks[-1])

    def _add(self, piece: str) -> Step:
        self.blocks[-1].pieces.append(piece)
        return Step("add", self.blocks[-1], piece)


def blocks_of(message: Mapping[str, Any]) -> list[Block]:
    """The blocks of a whole message."""
    reader = BlockReader()
    for _ in reader.feed(message):
        pass
    return reader.blocks
