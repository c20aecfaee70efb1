"""Structural tags: free text, tags, schemas and patterns put together, as a grammar in Lark.

Both of vLLM's forms are read: `{"structures": [...], "triggers": [...]}`, and xgrammar's `{"type":
"structural_tag", "format": {...}}`, whose formats are within each other. Whatever has no end of its
own (free text, a pattern) is one lazy lexeme together with the text that must follow it, and so
ends where that text first occurs.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm.engine.requests.lark import JSON_OPTIONS, lark_of, literal, pattern_literal
from nanovllm.engine.requests.schemas import check_schema, without_neutral
from nanovllm.engine.requests.tag_formats import (
    Format,
    Mark,
    as_list,
    count_of,
    flag_of,
    kind_of,
    listed,
    older_form,
    texts_of,
)
from nanovllm.utils.checks import shorten

MOST_FORMATS = 2_000  # after free text, what follows it is written once for each way to begin
MOST_LETTERS = 64  # of a text, that are lexemes of their own
ANY = "/(?s:.*)/"


class Ends(NamedTuple):
    """What is written behind a format: one of `marks`, or nothing if there are none.

    `final` says whether the output may end behind that.
    """

    marks: tuple[Mark, ...] = ()
    final: bool = False


NOTHING, OUTPUT = Ends(), Ends(final=True)


def tag_grammar(described: Any, tokens: Mapping[str, int], eos_token_ids: Collection[int]) -> str:
    """The grammar of a structural tag. `tokens` are the added tokens by their texts."""
    if not isinstance(described, dict):
        raise TypeError(f"it must be an object, got {shorten(described)}")
    writer = _Writer(tokens, eos_token_ids)
    if described.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be 'structural_tag', got {shorten(described['type'])}")
    fields = set(described) - {"type"}
    if fields == {"format"}:
        return writer.grammar("format", described["format"])
    if fields == {"triggers", "structures"}:
        try:
            return writer.grammar("", older_form(described))
        except (TypeError, ValueError) as error:  # whose places are those of the newer form
            text = str(error).replace("/content/json_schema", "/schema")
            text = text.replace("/tags", "structures").replace("/triggers", "triggers")
            raise type(error)(text) from None
    raise ValueError(
        "it must have a `format` alone, or `triggers` and `structures` alone, got"
        f" {shorten([*described])}"
    )


class _Writer:
    """Writes rules. A method for a format returns an expression for it and what is behind it."""

    def __init__(self, tokens: Mapping[str, int], eos_token_ids: Collection[int]) -> None:
        self._tokens, self._eos = tokens, frozenset(eos_token_ids)
        self._rules: list[str] = []
        self._num_formats = 0
        self._whole = False  # whether texts are one lexeme: beside free text, letters would be it

    def grammar(self, place: str, node: Any) -> str:
        start = self._format(place, node, OUTPUT)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _rule(self, expression: str, kind: str = "part", options: str = "") -> str:
        """The name of a new rule."""
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def _format(self, place: str, node: Any, ends: Ends) -> str:
        kind = kind_of(place, node)
        self._num_formats += 1
        if self._num_formats > MOST_FORMATS:
            raise ValueError(f"{place}: there are more than {MOST_FORMATS} formats")
        write: Callable[[str, Format, Ends], str] = getattr(self, f"_{kind}")
        return write(place, node, ends)

    # What formats are made of.

    def _mark(self, mark: Mark, final: bool = False) -> str:
        """A text, letter by letter or as the added token that it names; or a token.

        Letters are lexemes: of two texts that begin alike, the longer one would win at once.
        A token at which the output ends is written where it may end.
        """
        if isinstance(mark, int):
            if mark in self._eos and not final:
                raise ValueError(f"the token {mark} ends the output, and something must follow it")
            return f"<[{mark}]>"
        most = 0 if self._whole else MOST_LETTERS
        parts = [*mark[:most], mark[most:]] if mark[most:] or not mark else [*mark]
        letters = " ".join(map(literal, parts))
        token = self._tokens.get(mark)
        if token is None or (token in self._eos and not final):
            return f"({letters})"
        return f"({letters} | <[{token}]>)"

    def _marks(self, ends: Ends) -> str:
        return _any_of(self._mark(mark, ends.final) for mark in ends.marks) if ends.marks else ""

    def _until(self, terminal: str, ends: Ends) -> str:
        """A terminal, and the first of the marks behind it."""
        texts = [literal(mark) for mark in ends.marks if isinstance(mark, str)]
        ways = []
        if texts:
            ways.append(self._rule(f"{terminal} ({' | '.join(texts)})", "until", "[lazy]"))
        for mark in ends.marks:
            token = mark if isinstance(mark, int) else self._tokens.get(mark)
            if token is not None and (token not in self._eos or ends.final):
                ways.append(f"{terminal} <[{token}]>")
            elif isinstance(mark, int):
                self._mark(mark, ends.final)  # raises
        return _any_of(ways)

    def _text(self, place: str, excluded: Iterable[str], ends: Ends) -> str:
        """Free text."""
        texts = " | ".join(map(literal, excluded))
        terminal = f"{ANY} & ~({ANY} ({texts}) {ANY})" if texts else ANY
        name = self._rule(terminal, "TEXT")
        if ends.marks:
            return self._until(name, ends)
        self._check_free(place, ends)
        return name

    def _free_tokens(self, place: str, excluded: Collection[int], ends: Ends, most: str) -> str:
        """Free tokens."""
        self._check_free(place, ends)
        marks = [m if isinstance(m, int) else self._tokens.get(m) for m in ends.marks]
        if None in marks:
            raise ValueError(f"{place}: free tokens end with a token, got {shorten(ends.marks)}")
        not_these = {*excluded, *self._eos, *(m for m in marks if m is not None)}
        behind = _any_of(self._mark(m, ends.final) for m in marks if m is not None)
        return f"({_none_of(not_these)}){most} {behind if marks else ''}"

    def _check_free(self, place: str, ends: Ends) -> None:
        if not ends.marks and not ends.final:
            raise ValueError(
                f"{place}: nothing says where it ends: let a tag, a const_string or a token follow"
                " it, or put it into a tag that has an end"
            )

    def _token_id(self, place: str, token: Any) -> int:
        if isinstance(token, str) and token in self._tokens:
            return self._tokens[token]
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(
                f"{place} must be a token's id or the text of an added token, got {shorten(token)}"
            )
        return token

    def _token_ids(self, place: str, node: Format, name: str) -> list[int]:
        found = listed(f"{place}/{name}", node.get(name, []), int | str, empty=True)
        return [self._token_id(f"{place}/{name}/{i}", one) for i, one in enumerate(found)]

    def _mark_of(self, place: str, value: Any) -> Mark:
        """A text, or a format `token`."""
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and value.get("type") == "token":
            kind_of(place, value)
            return self._token_id(f"{place}/token", value["token"])
        raise TypeError(f"{place} must be a text or a format `token`, got {shorten(value)}")

    # Formats that are one piece.

    def _const_string(self, place: str, node: Format, ends: Ends) -> str:
        value = node["value"]
        if not isinstance(value, str):
            raise TypeError(f"{place}/value must be a text, got {shorten(value)}")
        return f"{self._mark(value, ends.final and not ends.marks)} {self._marks(ends)}"

    def _json_schema(self, place: str, node: Format, ends: Ends) -> str:
        place, schema = f"{place}/json_schema", node["json_schema"]
        for name, value in (("style", "json"), ("any_order", False)):
            if node.get(name, value) != value:
                raise ValueError(f"{place}: {name} must be {value!r}, got {shorten(node[name])}")
        if schema is not True and not isinstance(schema, dict):
            raise ValueError(f"{place} must be a JSON schema, got {shorten(schema)}")
        schema = {} if schema is True else schema
        check_schema(schema, place)
        written = json.dumps({"x-guidance": JSON_OPTIONS, **without_neutral(schema)})
        return f"{self._rule(f'%json {written}')} {self._marks(ends)}"

    def _grammar(self, place: str, node: Format, ends: Ends) -> str:
        grammar = node["grammar"]
        if not isinstance(grammar, str):
            raise TypeError(f"{place}/grammar must be a text, got {shorten(grammar)}")
        try:
            lark = lark_of(grammar)
        except ValueError as error:
            raise ValueError(f"{place}/grammar: {error}") from None
        nested = self._rule(f"%lark {{\n{lark}\n}}")
        return f"{nested} {self._marks(ends)}"

    def _regex(self, place: str, node: Format, ends: Ends) -> str:
        pattern = node["pattern"]
        if not isinstance(pattern, str):
            raise TypeError(f"{place}/pattern must be a text, got {shorten(pattern)}")
        try:
            name = self._rule(pattern_literal(pattern), "TEXT")
        except ValueError as error:
            raise ValueError(f"{place}/pattern: {error}") from None
        return self._until(name, ends) if ends.marks else name

    def _any_text(self, place: str, node: Format, ends: Ends) -> str:
        return self._text(place, texts_of(place, node, "excludes"), ends)

    def _token(self, place: str, node: Format, ends: Ends) -> str:
        mark = self._mark_of(place, node)
        return f"{self._mark(mark, ends.final and not ends.marks)} {self._marks(ends)}"

    def _exclude_token(self, place: str, node: Format, ends: Ends) -> str:
        excluded = {*self._token_ids(place, node, "exclude_tokens"), *self._eos}
        return f"{_none_of(excluded)} {self._marks(ends)}"

    def _any_tokens(self, place: str, node: Format, ends: Ends) -> str:
        most = node.get("max_tokens")
        times = "*" if most is None else f"{{0,{count_of(f'{place}/max_tokens', most)}}}"
        excluded = self._token_ids(place, node, "exclude_tokens")
        return self._free_tokens(place, excluded, ends, times)

    # Formats that are made of others.

    def _sequence(self, place: str, node: Format, ends: Ends) -> str:
        elements = listed(f"{place}/elements", node["elements"], dict)
        return self._row([(f"{place}/elements/{i}", one) for i, one in enumerate(elements)], ends)

    def _row(self, items: list[tuple[str, Any]], ends: Ends) -> str:
        """Formats behind each other. One that has no end is written with how the next begins."""
        written: list[str] = []
        for (place, first), following in itertools.pairwise(items):
            heads = self._heads(*following) if self._is_open(place, first) else []
            if heads:
                others = items[len(written) + 1 :]
                return " ".join([*written, self._up_to(heads, place, first, others, ends)])
            written.append(self._format(place, first, NOTHING))
        return " ".join([*written, self._format(*items[-1], ends)])

    def _up_to(
        self,
        heads: list[tuple[Mark, Format | None]],
        place: str,
        first: Any,
        others: list[tuple[str, Any]],
        ends: Ends,
    ) -> str:
        """A format up to each of the marks that the next one begins with, and what follows."""
        ways = []
        for mark, rest in heads:
            left = ([] if rest is None else [(others[0][0], rest)]) + others[1:]
            behind = self._row(left, ends) if left else self._marks(ends)
            final = ends.final and not ends.marks and not left
            ways.append(f"{self._format(place, first, Ends((mark,), final))} {behind}")
        return _any_of(ways)

    def _is_open(self, place: str, node: Any) -> bool:
        """Whether the format has no end of its own, or need not have one."""
        kind = kind_of(place, node)
        if kind == "sequence":
            elements = listed(f"{place}/elements", node["elements"], dict)
            return self._is_open(f"{place}/elements/{len(elements) - 1}", elements[-1])
        if kind == "or":
            elements = listed(f"{place}/elements", node["elements"], dict)
            return any(
                self._is_open(f"{place}/elements/{i}", one) for i, one in enumerate(elements)
            )
        if kind == "optional" or (kind == "tag" and "" in as_list(node["end"])):
            return self._is_open(f"{place}/content", node["content"])
        if kind in ("triggered_tags", "token_triggered_tags"):
            return not (node.get("at_least_one") and node.get("stop_after_first"))
        return kind in ("regex", "any_text", "any_tokens", "dispatch", "token_dispatch")

    def _heads(self, place: str, node: Any) -> list[tuple[Mark, Format | None]]:
        """The marks that the format may begin with, and what then follows; [] for others."""
        kind = kind_of(place, node)
        if kind == "const_string" and isinstance(node["value"], str) and node["value"]:
            return [(node["value"], None)]
        if kind == "token":
            return [(self._mark_of(place, node), None)]
        if kind == "tag" and node["begin"] != "":
            return [(self._mark_of(f"{place}/begin", node["begin"]), {**node, "begin": ""})]
        if kind == "sequence":
            first, *others = listed(f"{place}/elements", node["elements"], dict)
            found = self._heads(f"{place}/elements/0", first)
            return [(mark, _joined(rest, others)) for mark, rest in found]
        if kind == "or":
            elements = listed(f"{place}/elements", node["elements"], dict)
            all_heads = [
                self._heads(f"{place}/elements/{i}", one) for i, one in enumerate(elements)
            ]
            return [*itertools.chain(*all_heads)] if all(all_heads) else []
        return []

    def _or(self, place: str, node: Format, ends: Ends) -> str:
        elements = listed(f"{place}/elements", node["elements"], dict)
        whole, self._whole = self._whole, self._whole or self._is_open(place, node)
        written = _any_of(
            self._format(f"{place}/elements/{i}", one, ends) for i, one in enumerate(elements)
        )
        self._whole = whole
        return written

    def _optional(self, place: str, node: Format, ends: Ends) -> str:
        content = self._format(f"{place}/content", node["content"], ends)
        return _any_of([content, self._marks(ends) or literal("")])

    def _repeated(self, place: str, node: Format, times: str, ends: Ends) -> str:
        content = self._format(f"{place}/content", node["content"], NOTHING)
        return f"({content}){times} {self._marks(ends)}"

    def _star(self, place: str, node: Format, ends: Ends) -> str:
        return self._repeated(place, node, "*", ends)

    def _plus(self, place: str, node: Format, ends: Ends) -> str:
        return self._repeated(place, node, "+", ends)

    def _repeat(self, place: str, node: Format, ends: Ends) -> str:
        least, most = count_of(f"{place}/min", node["min"]), node["max"]
        if most == -1:
            return self._repeated(place, node, f"{{{least},}}", ends)
        most = count_of(f"{place}/max", most, least)
        return self._repeated(place, node, f"{{{least},{most}}}", ends)

    def _tag(self, place: str, node: Format, ends: Ends) -> str:
        begin = self._mark_of(f"{place}/begin", node["begin"])
        closers = as_list(node["end"])
        marks = [self._mark_of(f"{place}/end", one) for one in closers]
        if not marks:
            raise ValueError(f"{place}/end must be a text, several, or a format `token`, got []")
        content, ways = (f"{place}/content", node["content"]), []
        own = Ends(tuple(m for m in marks if m != ""), ends.final and not ends.marks)
        if own.marks:
            ways.append(f"{self._format(*content, own)} {self._marks(ends)}")
        if "" in marks:
            ways.append(self._format(*content, ends))
        return f"{self._mark(begin)} {_any_of(ways)}"

    def _tags(self, place: str, node: Format) -> list[tuple[str, Any]]:
        """The tags of a format, whose type may be left out."""
        tags = listed(f"{place}/tags", node["tags"], dict)
        items = [(f"{place}/tags/{i}", {"type": "tag", **tag}) for i, tag in enumerate(tags)]
        for at, tag in items:
            if kind_of(at, tag) != "tag":
                raise ValueError(f"{at} must be a tag, got type {tag['type']!r}")
        return items

    def _tags_with_separator(self, place: str, node: Format, ends: Ends) -> str:
        separator, least = node["separator"], flag_of(place, node, "at_least_one")
        if not isinstance(separator, str):
            raise TypeError(f"{place}/separator must be a text, got {shorten(separator)}")
        tag = self._rule(_any_of(self._format(*item, NOTHING) for item in self._tags(place, node)))
        tags = tag if flag_of(place, node, "stop_after_first") else (
            f"{tag} ({self._mark(separator)} {tag})*"
        )  # fmt: skip
        return f"({tags}){'' if least else '?'} {self._marks(ends)}"

    # Free text in which something begins at triggers.

    def _triggered_tags(self, place: str, node: Format, ends: Ends) -> str:
        triggers = texts_of(place, node, "triggers")
        if not triggers:
            raise ValueError(f"{place}/triggers must be a list of texts that is not empty, got []")
        behind, ways = Ends(final=ends.final and not ends.marks), []
        for at, tag in self._tags(place, node):
            begin = tag["begin"]
            if not isinstance(begin, str):
                raise TypeError(f"{at}/begin must be a text, got {shorten(begin)}")
            # The shortest one: it occurs before longer ones do.
            trigger = min((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise ValueError(f"{at}: no trigger begins {shorten(begin)}")
            rest = {**tag, "begin": begin[len(trigger) :]}
            ways.append((trigger, self._rule(self._format(at, rest, behind))))
        excluded = texts_of(place, node, "excludes")
        return self._dispatched(place, node, ways, lambda e: self._text(place, excluded, e), ends)

    def _token_triggered_tags(self, place: str, node: Format, ends: Ends) -> str:
        triggers = self._token_ids(place, node, "trigger_tokens")
        behind, ways = Ends(final=ends.final and not ends.marks), []
        for at, tag in self._tags(place, node):
            begin = self._mark_of(f"{at}/begin", tag["begin"])
            if begin not in triggers:
                raise ValueError(f"{at}: no trigger token is {shorten(tag['begin'])}")
            ways.append((begin, self._rule(self._format(at, {**tag, "begin": ""}, behind))))
        excluded = [*triggers, *self._token_ids(place, node, "exclude_tokens")]
        return self._dispatched(
            place, node, ways, lambda e: self._free_tokens(place, excluded, e, "*"), ends
        )

    def _rules_of(
        self, place: str, node: Format, mark_of: Callable[[str, Any], Mark]
    ) -> list[tuple[Mark, str]]:
        """The marks of a dispatch, each with a rule for what must follow it."""
        ways = []
        for i, one in enumerate(listed(f"{place}/rules", node["rules"], list)):
            if len(one) != 2 or one[0] == "":
                raise ValueError(f"{place}/rules/{i} must be a pair, got {shorten(one)}")
            written = self._rule(self._format(f"{place}/rules/{i}/1", one[1], NOTHING))
            ways.append((mark_of(f"{place}/rules/{i}/0", one[0]), written))
        return ways

    def _dispatch(self, place: str, node: Format, ends: Ends) -> str:
        ways = self._rules_of(place, node, self._mark_of)
        excluded = texts_of(place, node, "excludes")
        return self._dispatched(place, node, ways, lambda e: self._text(place, excluded, e), ends)

    def _token_dispatch(self, place: str, node: Format, ends: Ends) -> str:
        ways = self._rules_of(place, node, self._token_id)
        excluded = [*self._token_ids(place, node, "exclude_tokens")]
        excluded += [mark for mark, _ in ways if isinstance(mark, int)]
        return self._dispatched(
            place, node, ways, lambda e: self._free_tokens(place, excluded, e, "*"), ends
        )

    def _dispatched(
        self,
        place: str,
        node: Format,
        ways: Sequence[tuple[Mark, str]],
        free: Callable[[Ends], str],
        ends: Ends,
    ) -> str:
        """Free text up to each mark, behind which the rule holds; and free text at last."""
        first = flag_of(place, node, "at_least_one")
        once = flag_of(place, node, "stop_after_first") or not flag_of(place, node, "loop", True)
        begun = _any_of(f"{self._mark(mark)} {rule}" for mark, rule in ways)
        if first and once:
            return f"{begun} {self._marks(ends)}"
        part = _any_of(f"{free(Ends((mark,)))} {rule}" for mark, rule in ways)
        if once:
            return _any_of([f"{part} {self._marks(ends)}", free(ends)])
        return f"{begun if first else ''} {part}* {free(ends)}"


def _any_of(ways: Iterable[str]) -> str:
    return f"({' | '.join(ways)})"


def _none_of(token_ids: Collection[int]) -> str:
    return f"<[^{','.join(map(str, sorted(token_ids)))}]>" if token_ids else "<[*]>"


def _joined(first: Format | None, others: list[Format]) -> Format | None:
    """A sequence; None if nothing is in it."""
    elements = ([] if first is None else [first]) + others
    return {"type": "sequence", "elements": elements} if elements else None
