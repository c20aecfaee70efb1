"""GrammarWriter: the rules of a grammar, and the marks and free text that formats are made of."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nanovllm.structured.lark import literal, pattern_literal
from nanovllm.structured.patterns import MOST_WRITTEN
from nanovllm.structured.structural_tags.formats import Format, Mark, kind_of, listed
from nanovllm.utils.checks import shorten

MOST_FORMATS = 2_000  # formats after free text are written once for each way to begin
MOST_LETTERS = 64  # letters of a text that are separate lexemes
ANY = "/(?s:.*)/"


class Ends(NamedTuple):
    """The text after a format: one of `marks`, or nothing if there are none.

    `final` says whether the output may end after it.
    """

    marks: tuple[Mark, ...] = ()
    final: bool = False


NOTHING = Ends()


class GrammarWriter:
    """Writes rules. `tokens` are the added tokens by their texts.

    `functions` has a function for each type of format: it takes the writer, the format with its
    place, and the text after it, and returns an expression for both.
    """

    def __init__(
        self,
        functions: "Mapping[str, WriteFormat]",
        tokens: Mapping[str, int],
        eos_token_ids: Collection[int],
    ) -> None:
        self._functions, self._tokens = functions, tokens
        self.eos = frozenset(eos_token_ids)
        self.rules: list[str] = []
        self._num_formats = self._num_written = 0
        self._whole = False

    def format(self, place: str, node: Any, ends: Ends) -> str:
        """A format of any type, and the text after it."""
        kind = kind_of(place, node)
        self._num_formats += 1
        if self._num_formats > MOST_FORMATS:
            raise ValueError(f"{place}: there are more than {MOST_FORMATS} formats")
        return self._functions[kind](self, place, node, ends)

    def rule(self, expression: str, kind: str = "part", options: str = "") -> str:
        """The name of a new rule."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {expression}")
        return name

    def pattern(self, pattern: str) -> str:
        """The name of a new rule for a pattern. Raises if all have too many characters together."""
        written = pattern_literal(pattern)
        self._num_written += len(written)
        if self._num_written > MOST_WRITTEN:
            raise ValueError(
                f"the patterns must have at most {MOST_WRITTEN} characters together with their"
                " classes written out, got more"
            )
        return self.rule(written, "TEXT")

    def mark(self, mark: Mark, final: bool = False) -> str:
        """A text, letter by letter or as the added token that it names; or a token.

        Letters are separate lexemes: between two texts with the same beginning, a lexer would
        choose the longer one at once. A token that ends the output is written where the output may
        end.
        """
        if isinstance(mark, int):
            if mark in self.eos and not final:
                raise ValueError(f"the token {mark} ends the output, and something must follow it")
            return f"<[{mark}]>"
        most = 0 if self._whole else MOST_LETTERS
        parts = [*mark[:most], mark[most:]] if mark[most:] or not mark else [*mark]
        letters = " ".join(map(literal, parts))
        token = self._tokens.get(mark)
        if token is None or (token in self.eos and not final):
            return f"({letters})"
        return f"({letters} | <[{token}]>)"

    def marks(self, ends: Ends) -> str:
        """One of the marks after a format."""
        return any_of(self.mark(mark, ends.final) for mark in ends.marks) if ends.marks else ""

    @contextlib.contextmanager
    def whole_texts(self, beside_free_text: bool) -> Iterator[None]:
        """Make texts in the block one lexeme; letters would match the free text around them."""
        before, self._whole = self._whole, self._whole or beside_free_text
        yield
        self._whole = before

    def until(self, terminal: str, ends: Ends) -> str:
        """A terminal, and the first of the marks after it."""
        texts = [literal(mark) for mark in ends.marks if isinstance(mark, str)]
        ways = []
        if texts:
            ways.append(self.rule(f"{terminal} ({' | '.join(texts)})", "until", "[lazy]"))
        for mark in ends.marks:
            token = mark if isinstance(mark, int) else self._tokens.get(mark)
            if token is not None and (token not in self.eos or ends.final):
                ways.append(f"{terminal} <[{token}]>")
            elif isinstance(mark, int):
                self.mark(mark, ends.final)  # raises
        return any_of(ways)

    def free_text(self, place: str, excluded: Iterable[str], ends: Ends) -> str:
        """Text without the excluded texts, up to a mark."""
        texts = " | ".join(map(literal, excluded))
        terminal = f"{ANY} & ~({ANY} ({texts}) {ANY})" if texts else ANY
        name = self.rule(terminal, "TEXT")
        if ends.marks:
            return self.until(name, ends)
        _check_free(place, ends)
        return name

    def free_tokens(
        self, place: str, excluded: Collection[int], ends: Ends, times: str = "*"
    ) -> str:
        """Tokens without the excluded ones, up to a mark."""
        _check_free(place, ends)
        marks = [m if isinstance(m, int) else self._tokens.get(m) for m in ends.marks]
        if None in marks:
            raise ValueError(f"{place}: free tokens end with a token, got {shorten(ends.marks)}")
        not_these = {*excluded, *self.eos, *(m for m in marks if m is not None)}
        behind = any_of(self.mark(m, ends.final) for m in marks if m is not None)
        return f"({none_of(not_these)}){times} {behind if marks else ''}"

    def token_id(self, place: str, token: Any) -> int:
        """The id of a token, which may be named by its text."""
        if isinstance(token, str) and token in self._tokens:
            return self._tokens[token]
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(
                f"{place} must be a token's id or the text of an added token, got {shorten(token)}"
            )
        return token

    def token_ids(self, place: str, node: Format, name: str) -> list[int]:
        """The tokens of a field, which may be missing."""
        found = listed(f"{place}/{name}", node.get(name, []), int | str, empty=True)
        return [self.token_id(f"{place}/{name}/{i}", one) for i, one in enumerate(found)]

    def mark_of(self, place: str, value: Any) -> Mark:
        """A text, or a format `token`."""
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and value.get("type") == "token":
            kind_of(place, value)
            return self.token_id(f"{place}/token", value["token"])
        raise TypeError(f"{place} must be a text or a format `token`, got {shorten(value)}")


WriteFormat = Callable[[GrammarWriter, str, Format, Ends], str]


def _check_free(place: str, ends: Ends) -> None:
    if not ends.marks and not ends.final:
        raise ValueError(
            f"{place}: nothing says where it ends: let a tag, a const_string or a token follow"
            " it, or put it into a tag that has an end"
        )


def any_of(ways: Iterable[str]) -> str:
    """One of several expressions."""
    return f"({' | '.join(ways)})"


def none_of(token_ids: Collection[int]) -> str:
    """Any token but these."""
    return f"<[^{','.join(map(str, sorted(token_ids)))}]>" if token_ids else "<[*]>"
