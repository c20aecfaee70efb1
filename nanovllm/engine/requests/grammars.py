"""Grammars: compiles what `structured_outputs` ask for, and makes constraints of it."""

import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.engine.requests.compiled import CompiledGrammars
from nanovllm.engine.requests.constraint import Constraint, FreeText, reason_of
from nanovllm.engine.requests.schemas import check_schema, place
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_SHOWN = 1_000  # characters of an error
MOST_LINES = 1_000  # of a grammar: rules that each need the next one overflow llguidance's stack
# For all schemas. Escapes such as \u0061 could write the name of a property, or of one that a
# pattern is for, as one that has any value: no string is written with them.
JSON_OPTIONS = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": '"\\bfnrt'}
# llguidance looks at all tokens of such a kind at once where a mask may allow all of them; of other
# tokens, at each. Its own kinds are those of JSON's strings.
LETTERS = ("[a-zA-Z]{1,10}", "[a-zA-Z]+", "[a-z]+")
TEXT = r"/(.|\n)*/"
HIDDEN = "\ufdd0"  # no character: begins no text


class Grammars:
    """Grammars over a model's vocabulary, compiled once each. For use by several threads.

    Compiling blocks the thread that asks, for milliseconds with schemas of usual size; other
    threads go on. The first constraint blocks all threads for the second that llguidance takes to
    read a large vocabulary: it does not release Python's lock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._read: LLTokenizer | None = None
        self._compiled = CompiledGrammars(self._compile)

    def constraint(
        self, asked: StructuredOutputs, eos_token_ids: Iterable[int] | None = None
    ) -> Constraint:
        """A constraint at its start, which may end with these tokens, by default with all of EOS.

        A grammar that llguidance refuses is a ValueError.
        """
        matcher, tokenizer = self._compiled.matcher(asked), self._tokenizer()
        ends = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        free = None
        if asked.after is not None:
            free = FreeText(asked.after.encode(), self._bytes_of)
        excluded = set(tokenizer.eos_tokens).difference(ends)
        return Constraint(matcher, tokenizer.vocab_size, excluded, free, tokenizer.eos_tokens)

    @functools.cached_property
    def _added(self) -> dict[str, int]:
        """The added tokens by their texts: read when they are needed, as the tokenizer is."""
        added: dict[str, int] = self._source.get_added_vocab()
        return added

    @functools.cached_property
    def _texts(self) -> dict[int, bytes]:
        return {token_id: text.encode() for text, token_id in self._added.items()}

    def _bytes_of(self, token_id: int) -> bytes:
        """The text of a token."""
        text = self._texts.get(token_id)
        return self._tokenizer().decode_bytes([token_id]) if text is None else text

    def _compile(self, asked: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher

        tokenizer = self._tokenizer()
        try:
            grammar = _grammar(asked, tokenizer, self._added)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            error = _error(matcher, asked)
        except (TypeError, ValueError, RecursionError) as raised:  # before llguidance's parsing
            error = str(raised)
        if error:
            raise ValueError(f"structured_outputs: {asked.kind}: {error[:MOST_SHOWN]}")
        return matcher

    def _tokenizer(self) -> "LLTokenizer":
        """llguidance's view of the tokenizer, made when it is first needed."""
        with self._lock:
            if self._read is None:
                self._read = _read(self._source, self._vocab_size, self._eos_token_ids)
            return self._read


def _read(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """The tokenizer with as many tokens as the model's masks have, or more if it has more."""
    from llguidance import LLTokenizer

    if tokenizer is None:
        raise ValueError(
            "structured_outputs: there is no text, as the model directory has no tokenizer; pass"
            " tokenizer=... when the engine is made"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("structured_outputs need a tokenizer with a tokenizer.json")
    text = json.dumps(_hidden(json.loads(backend.to_str())))
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    return LLTokenizer(
        text,
        n_vocab=max(vocab_size, num_tokens),
        eos_token=[i for i in eos_token_ids if i < num_tokens] or None,
        slices=[*LLTokenizer.general_slices(), *LETTERS],
    )


def _hidden(described: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose added tokens no text contains.

    Else a text such as "<|im_end|>" within a grammar would be that token, which is no text.
    """
    model, added = described["model"], described["added_tokens"]
    names = {token["content"]: HIDDEN + token["content"] for token in added}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    elif vocab is not None:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokens = [{**token, "content": names[token["content"]]} for token in added]
    return {**described, "added_tokens": tokens, "truncation": None, "padding": None}


def _error(matcher: "LLMatcher", asked: StructuredOutputs) -> str:
    """Why the matcher is of no use, or ""."""
    if matcher.is_error():
        error = reason_of(matcher)
        return error + (place(json.loads(asked.json), error) if asked.kind == "json" else "")
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        return f"no text can begin: {reason_of(first)}"
    return "" if first.is_accepting() or not first.is_stopped() else "no text can begin"


def _grammar(asked: StructuredOutputs, tokenizer: "LLTokenizer", added: Mapping[str, int]) -> str:
    """The grammar in llguidance's language."""
    from llguidance import LLMatcher

    if asked.kind in ("json", "json_object"):
        schema = asked.json or '{"type":"object"}'
        if schema == "false":
            raise ValueError("there is nothing that the schema false allows")
        schema = "{}" if schema == "true" else schema
        check_schema(json.loads(schema))
        options: Any = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            _check_whitespace(asked.whitespace_pattern, tokenizer)
            options["whitespace_pattern"] = asked.whitespace_pattern
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if asked.regex is not None:
        if (len(asked.regex) - len(asked.regex.rstrip("\\"))) % 2:
            raise ValueError("a backslash at the end has nothing to escape")
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return f"start: TEXT\nTEXT: {' | '.join(map(_literal, asked.choice))}"
    if asked.grammar is not None:
        return _lark(asked.grammar)
    return _tag_grammar(json.loads(asked.structural_tag), added)


def _check_whitespace(pattern: str, tokenizer: "LLTokenizer") -> None:
    """Refuse a pattern that matches anything else: the output would not be JSON."""
    from llguidance import LLMatcher, regex_to_lark

    rule = f"/{regex_to_lark(pattern)}/ & ~/[ \\t\\r\\n]*/"
    others = LLMatcher(tokenizer, f"start: OTHER\nOTHER: {rule}", log_level=0)
    if others.is_error():
        raise ValueError(f"whitespace_pattern: {reason_of(others)}")
    others.compute_bitmask()
    if not others.is_error():  # something can begin
        raise ValueError(f"whitespace_pattern: {pattern!r} matches more than [ \\t\\r\\n]*")


def _lark(grammar: str) -> str:
    """Lark of Lark or GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if grammar.lstrip().startswith("{"):
        raise ValueError("it must be Lark or GBNF, got JSON")
    lark = grammar
    if "::=" in grammar and not re.search(r"^\s*start\s*:(?!:)", grammar, re.MULTILINE):
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # the parser raises plain ones, too
            raise ValueError(f"as GBNF, which ::= stands for: {error}") from None
    size = len(lark.splitlines()) + 2 * lark.count("$ref")
    if size > MOST_LINES:
        raise ValueError(f"it must have at most {MOST_LINES} lines, got {size}")
    return str(lark)


def _literal(text: str) -> str:
    """A text in Lark, which has JSON's escapes but takes no DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tag_grammar(described: Any, added: Mapping[str, int]) -> str:
    """Free text in which parts follow that begin with triggers.

    A trigger or an end that is a token of its own may be that token, or be written by others.
    """
    triggers = _listed(described, "triggers", str)
    if described.keys() - {"triggers", "structures", "type"}:
        raise ValueError(f"it must have triggers and structures alone, got {shorten([*described])}")
    rules = []
    for index, part in enumerate(_listed(described, "structures", dict)):
        begin, schema, end = (part.get(name) for name in ("begin", "schema", "end"))
        texts = isinstance(begin, str) and isinstance(end, str)
        if len(part) != 3 or not texts or not isinstance(schema, dict):
            raise ValueError(
                f"structures/{index} must have texts `begin` and `end` and a `schema`,"
                f" got {shorten(part)}"
            )
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"structures/{index}: no trigger begins {shorten(begin)}")
        check_schema(schema, f"structures/{index}/schema")
        written = json.dumps({"x-guidance": JSON_OPTIONS, **schema})
        token = _token(trigger, added)
        head = f"(head_{index} | TEXT {token})" if token else f"head_{index}"
        rest = _literal(begin[len(trigger) :])
        rules += [
            f"head_{index}[lazy]: TEXT {_literal(trigger)}",
            f"part_{index}: {head} {rest} %json {written} {_text_or_token(end, added)}",
        ]
    names = " | ".join(f"part_{index}" for index in range(len(rules) // 2))
    return "\n".join(["%llguidance {}", f"start: ({names})* TEXT", *rules, f"TEXT: {TEXT}"])


def _listed(described: Any, name: str, kind: type) -> list[Any]:
    """A list of a structural tag's description."""
    values = described.get(name) if isinstance(described, dict) else None
    if not isinstance(values, list) or not values or not all(isinstance(v, kind) for v in values):
        what = "texts" if kind is str else "objects"
        raise ValueError(f"{name} must be a list of {what} that is not empty")
    return values


def _text_or_token(text: str, added: Mapping[str, int]) -> str:
    token = _token(text, added)
    return f"({_literal(text)} | {token})" if token else _literal(text)


def _token(text: str, added: Mapping[str, int]) -> str:
    """The added token that is this text, in Lark; "" if there is none."""
    return f"<[{added[text]}]>" if text in added else ""
