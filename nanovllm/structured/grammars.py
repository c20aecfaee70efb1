"""Grammars: compiles the grammars of `structured_outputs`, and makes constraints of them."""

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.structured.compiled import MOST_BYTES, CompiledGrammars
from nanovllm.structured.constraint import FreeText, GrammarConstraint
from nanovllm.structured.grammar_text import grammar_text
from nanovllm.structured.long_text import LongText, may_be_long
from nanovllm.structured.trial import error_of
from nanovllm.structured.vocabulary import read_vocabulary
from nanovllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_REFUSED, MOST_MARKERS = 16, 32  # refused grammars and markers that are kept
MOST_SHOWN = 1_000  # characters of an error


class Grammars:
    """Grammars over a model's vocabulary, compiled once each. For use by several threads.

    Compiling blocks the calling thread, for milliseconds with schemas of usual size; other threads
    go on. The first constraint blocks all threads while llguidance reads the vocabulary, for a
    second if it is large, because llguidance does not release Python's lock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._read: LLTokenizer | None = None
        self._compiled = CompiledGrammars(self._compile)
        self._refused: dict[StructuredOutputs, str] = {}  # the last ones: some take seconds
        self._reaching = functools.lru_cache(MOST_MARKERS)(self._find_reaching)
        self._beyond: dict[StructuredOutputs, dict[int, tuple[int, ...]]] = {}  # the last ones

    def constraint(
        self, asked: StructuredOutputs, eos_token_ids: Iterable[int] | None = None
    ) -> GrammarConstraint:
        """A constraint at its start. It may end with these tokens, by default with any EOS token.

        A grammar that llguidance refuses is a ValueError.
        """
        if (error := self._refused.get(asked)) is not None:
            raise ValueError(error)
        tokenizer = self._tokenizer()  # before the rest: reading it does not count as compiling
        matcher: Any = self._compiled.matcher(asked) if asked.kind else None
        ends = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        free = None
        if asked.after is not None:
            marker, tokens_of = asked.after.encode(), tokenizer.tokenize_bytes
            free = FreeText(marker, self._bytes_of, tokens_of, self._beyond_of(asked))
        excluded = set(tokenizer.eos_tokens).difference(ends)
        long = self._long_text if tokenizer.is_canonical and may_be_long(asked) else None
        size, eos = tokenizer.vocab_size, tokenizer.eos_tokens
        if asked.after_tokens is None:
            return GrammarConstraint(matcher, size, excluded, free, eos, long)
        from nanovllm.structured.bounded_text import BoundedConstraint

        assert asked.after is not None
        token_id = self._added.get(asked.after)
        forced = tokens_of(marker) if token_id is None else [token_id]
        return BoundedConstraint(
            matcher, size, excluded, free, eos, long, asked.after_tokens, forced, not asked.kind
        )

    @functools.cached_property
    def _long_text(self) -> LongText:
        return LongText(self._bytes_of, self._tokenizer().tokenize_bytes)

    def has(self, asked: StructuredOutputs) -> bool:
        """Whether the grammar is compiled, or known to be wrong: a constraint is made soon."""
        known = asked.after is None or asked in self._beyond
        is_compiled = not asked.kind or self._compiled.has(asked)
        return asked in self._refused or (known and is_compiled)

    @functools.cached_property
    def _added(self) -> dict[str, int]:
        """The added tokens by their texts; read when they are first needed, as the tokenizer is."""
        added: dict[str, int] = self._source.get_added_vocab()
        return added

    @functools.cached_property
    def _texts(self) -> dict[int, bytes]:
        return {token_id: text.encode() for text, token_id in self._added.items()}

    def _bytes_of(self, token_id: int) -> bytes:
        """The text of a token; b"" if the tokenizer has no such token."""
        text = self._texts.get(token_id)
        if text is not None or token_id not in self._vocabulary:
            return text or b""
        return self._tokenizer().decode_bytes([token_id])

    @functools.cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self._source.get_vocab().values())

    def _find_reaching(self, marker: bytes) -> dict[int, list[tuple[int, bytes]]]:
        """The tokens that complete the marker and have more text, with this text.

        They are listed by how much of the marker must come before them.
        """
        found: dict[int, list[tuple[int, bytes]]] = {}
        for token_id in self._vocabulary:
            text = self._bytes_of(token_id)
            behind = text.partition(marker)[2]
            if behind:
                found.setdefault(0, []).append((token_id, behind))
            for size in range(1, min(len(text), len(marker))) if text[:1] in marker else ():
                if marker.endswith(text[:size]):
                    length = len(marker) - size
                    found.setdefault(length, []).append((token_id, text[size:]))
        return found

    def _beyond_of(self, asked: StructuredOutputs) -> dict[int, tuple[int, ...]]:
        found = self._beyond.get(asked)
        if found is None:
            found = self._find_beyond(asked)
            self._keep(self._beyond, asked, found, MOST_MARKERS)
        return found

    def _find_beyond(self, asked: StructuredOutputs) -> dict[int, tuple[int, ...]]:
        """Those of them with text after the marker that the grammar does not allow."""
        assert asked.after is not None
        if not asked.kind:  # any text may come behind the marker
            return {}
        marker, matcher = asked.after.encode(), self._compiled.matcher(asked)
        free = FreeText(marker, self._bytes_of, self._tokenizer().tokenize_bytes, {})
        return {
            length: tuple(token_id for token_id, rest in few if free.begin(matcher, rest) is None)
            for length, few in self._reaching(marker).items()
        }

    def _compile(self, asked: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher

        tokenizer = self._tokenizer()
        try:
            grammar = grammar_text(asked, tokenizer, self._added)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            error = error_of(matcher, tokenizer, asked)
        except (TypeError, ValueError, RecursionError) as raised:  # before llguidance's parsing
            error = str(raised)
            if "recursion limit exceeded" in error:
                error = "it is nested too deeply: JSON may have 127 levels"
        if error:
            error = f"structured_outputs: {asked.kind}: {error[:MOST_SHOWN]}"
            self._keep(self._refused, asked, error, MOST_REFUSED)
            raise ValueError(error)
        return matcher

    def _keep(
        self, kept: dict[StructuredOutputs, Any], asked: StructuredOutputs, value: Any, most: int
    ) -> None:
        """Keep a value, and drop the oldest ones above `most` values or `MOST_BYTES` of texts."""
        with self._lock:
            kept[asked] = value
            size = sum(one.size for one in kept)
            while len(kept) > 1 and (len(kept) > most or size > MOST_BYTES):
                oldest = next(iter(kept))
                size -= oldest.size
                del kept[oldest]

    def _tokenizer(self) -> "LLTokenizer":
        """llguidance's view of the tokenizer, made when it is first needed."""
        with self._lock:
            if self._read is None:
                self._read = read_vocabulary(self._source, self._vocab_size, self._eos_token_ids)
            return self._read
