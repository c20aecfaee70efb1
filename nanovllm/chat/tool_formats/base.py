"""ToolFormat: the base of all formats of tool calls, and the parts of a call."""

import secrets
import string
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, NamedTuple

from nanovllm.chat.tool_formats.source import Source
from nanovllm.chat.tools import Tool

LETTERS = string.ascii_letters + string.digits


class Part(NamedTuple):
    """A part of a parsed text: a call's name, a piece of its arguments, or `is_whole`.

    `is_whole` means that all calls up to here are well-formed.
    """

    name: str = ""
    arguments: str = ""
    call_id: str = ""
    is_whole: bool = False


WHOLE = Part(is_whole=True)
Reading = Generator[Part | None, None, bool]  # None: more text is needed


def headed(head: Sequence[Part], reading: Reading) -> Reading:
    """The parts of `reading`, with `head` before the first one."""
    while True:
        try:
            part = next(reading)
        except StopIteration as stop:
            found: bool = stop.value
            return found
        if part is not None:
            yield from head
            head = ()
        yield part


class ToolFormat:
    """A format: where calls may begin, how they are read, and the grammar that makes them.

    Calls begin at `marker`, anywhere, or with the character `first`, if there is one, at the start
    of the answer.
    """

    marker: ClassVar[str] = ""
    first: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = ()  # they may be special tokens, which the text then needs

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading:
        """Read calls from `source`, which is at the marker or at the first character.

        In some formats the schemas of `tools` say how a value is written. The returned value has no
        meaning: calls count up to the last `WHOLE` that was yielded.
        """
        raise NotImplementedError

    def grammar(
        self, tools: Sequence[Tool], several: bool, literal: Callable[[str], str]
    ) -> list[str]:
        """Rules in Lark. The rule `calls` is a call of one of `tools`, or `several`.

        `literal` makes a rule's literal of a text, which may be a special token.
        """
        raise NotImplementedError

    def new_id(self) -> str:
        """A new id of a call."""
        return f"call_{_random_text(24)}"


def short_id() -> str:
    """An id in the form that Mistral's templates require."""
    return _random_text(9)


def _random_text(length: int) -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(length))
