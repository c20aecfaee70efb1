"""Grammars: compiles what `structured_outputs` ask for, and makes constraints of it."""

import functools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.engine.requests.constraint import Constraint, FreeText, reason_of
from nanovllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_KEPT = 256  # compiled grammars


class Grammars:
    """Grammars over a model's vocabulary, compiled once each. For use by several threads.

    Compiling blocks the thread that asks, for a millisecond with schemas of usual size, and at
    first for the second that llguidance takes to read a large vocabulary. Other threads go on.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._read: LLTokenizer | None = None
        self._compiled = functools.lru_cache(MOST_KEPT)(self._compile)

    def constraint(
        self, asked: StructuredOutputs, eos_token_ids: Iterable[int] | None = None
    ) -> Constraint:
        """A constraint at its start, which may end with these tokens, by default with all of EOS.

        A grammar that llguidance refuses is a ValueError.
        """
        matcher, tokenizer = self._compiled(asked), self._tokenizer()
        ends = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        free = None
        if asked.after is not None:
            free = FreeText(asked.after.encode(), lambda i: tokenizer.decode_bytes([i]))
        excluded = set(tokenizer.eos_tokens).difference(ends)
        return Constraint(matcher, tokenizer.vocab_size, excluded, free)

    def _compile(self, asked: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher

        tokenizer = self._tokenizer()
        try:
            matcher = LLMatcher(tokenizer, _grammar(asked), log_level=0)
            error = reason_of(matcher) if matcher.is_error() else ""
        except (TypeError, ValueError, AssertionError, KeyError) as raised:  # of our own parsing
            error = str(raised)
        if error:
            place = _place(asked, error)
            raise ValueError(f"structured_outputs: {asked.kind}: {error}{place}")
        return matcher

    def _tokenizer(self) -> "LLTokenizer":
        """llguidance's view of the tokenizer, made when it is first needed."""
        with self._lock:
            if self._read is None:
                self._read = _read(self._source, self._vocab_size, self._eos_token_ids)
            return self._read


def _read(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    from llguidance import LLTokenizer

    if tokenizer is None:
        raise ValueError(
            "structured_outputs: there is no text, as the model directory has no tokenizer; pass"
            " tokenizer=... when the engine is made"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("structured_outputs need a tokenizer with a tokenizer.json")
    size = max(vocab_size, len(tokenizer))
    return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=eos_token_ids or None)


def _grammar(asked: StructuredOutputs) -> str:
    """The grammar in llguidance's language."""
    from llguidance import LLMatcher, StructTag
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if asked.kind in ("json", "json_object"):
        schema = asked.json or '{"type":"object"}'
        if schema == "false":
            raise ValueError("there is nothing that the schema false allows")
        schema = "{}" if schema == "true" else schema
        options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in asked.choice)
        return f"start: {' | '.join(texts)}"
    if asked.grammar is not None:
        return gbnf_to_lark(asked.grammar) if "::=" in asked.grammar else asked.grammar
    return StructTag.to_grammar([*_tags(json.loads(asked.structural_tag), StructTag)])


def _tags(described: Any, kind: Any) -> Iterator[Any]:
    """The parts of a structural tag."""
    triggers = described["triggers"]
    for part in described["structures"]:
        trigger = next((t for t in triggers if part["begin"].startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {part['begin']!r}")
        yield kind(trigger=trigger, begin=part["begin"], grammar=part["schema"], end=part["end"])


def _place(asked: StructuredOutputs, error: str) -> str:
    """Where in a schema the keywords are that an error names."""
    if asked.kind != "json":
        return ""
    places = [
        f"{path}/{name}"
        for path, schema in _objects(json.loads(asked.json), "#")
        for name, value in schema.items()
        if f'"{name}"' in error or (isinstance(value, str) and error.endswith(f": {value}"))
    ]
    return f" (at {', '.join(places[:3])})" if places else ""


def _objects(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects of a JSON value, with their places."""
    if isinstance(value, dict):
        yield path, value
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for name, part in items:
        yield from _objects(part, f"{path}/{name}")
