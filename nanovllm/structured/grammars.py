"""Grammars: compiles the grammars of `structured_outputs`, and makes constraints of them."""

import functools
import json
import re
import threading
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.structured.compiled import MOST_BYTES, CompiledGrammars
from nanovllm.structured.constraint import FreeText, GrammarConstraint, reason_of
from nanovllm.structured.lark import (
    JSON_OPTIONS,
    lark_of,
    literal,
    pattern_literal,
    schemas_in_lark,
)
from nanovllm.structured.long_text import LongText, may_be_long
from nanovllm.structured.schema_errors import explained
from nanovllm.structured.schemas import check_schema, without_neutral
from nanovllm.structured.structural_tags.formats import schemas_in
from nanovllm.structured.structural_tags.grammar import tag_grammar
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_REFUSED, MOST_MARKERS = 16, 32  # refused grammars and markers that are kept
MOST_SHOWN = 1_000  # characters of an error
TRIAL_TOKENS, TRIAL_WAYS = 32, 8
PLACE_IN_LARK = re.compile(r"^at \d+\(\d+\): ")
# If a mask may allow all tokens of such a kind, llguidance checks them together; it checks other
# tokens one by one. Its own kinds are those of JSON's strings.
LETTERS = ("[a-zA-Z]{1,10}", "[a-zA-Z]+", "[a-z]+")
HIDDEN = "\ufdd0"  # not a character, so no text begins with it


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
        matcher = self._compiled.matcher(asked)
        ends = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        free = None
        if asked.after is not None:
            marker, tokens_of = asked.after.encode(), tokenizer.tokenize_bytes
            free = FreeText(marker, self._bytes_of, tokens_of, self._beyond_of(asked))
        excluded = set(tokenizer.eos_tokens).difference(ends)
        long = self._long_text if tokenizer.is_canonical and may_be_long(asked) else None
        return GrammarConstraint(
            matcher, tokenizer.vocab_size, excluded, free, tokenizer.eos_tokens, long
        )

    @functools.cached_property
    def _long_text(self) -> LongText:
        return LongText(self._bytes_of, self._tokenizer().tokenize_bytes)

    def has(self, asked: StructuredOutputs) -> bool:
        """Whether the grammar is compiled, or known to be wrong: a constraint is made soon."""
        known = asked.after is None or asked in self._beyond
        return asked in self._refused or (known and self._compiled.has(asked))

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
            grammar = _grammar(asked, tokenizer, self._added)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            error = _error(matcher, tokenizer, asked)
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
                self._read = _read(self._source, self._vocab_size, self._eos_token_ids)
            return self._read


def _read(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """Read the tokenizer with as many tokens as the model's masks have, or more if it has more."""
    from llguidance import LLTokenizer

    if tokenizer is None:
        raise ValueError(
            "structured_outputs: there is no text, as the model directory has no tokenizer; pass"
            " tokenizer=... when the engine is made"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("structured_outputs need a tokenizer with a tokenizer.json")
    text = json.dumps(_described(backend, eos_token_ids))
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    return LLTokenizer(
        text,
        n_vocab=max(vocab_size, num_tokens),
        eos_token=[i for i in eos_token_ids if i < num_tokens] or None,
        slices=[*LLTokenizer.general_slices(), *LETTERS],
    )


def _described(backend: Any, eos_token_ids: Container[int] = ()) -> dict[str, Any]:
    """Make a tokenizer.json for llguidance, in which special tokens and EOS tokens are not text.

    Otherwise a text such as "<|im_end|>" in a grammar would match that token. Other added tokens,
    such as Qwen3's "</think>", are text. They become ordinary tokens of the vocabulary, because
    llguidance treats all added tokens in angle brackets as special. If a vocabulary has no room for
    such a token, or a normalizer changes its text, it becomes special, and only its letters are
    text.
    """
    described = json.loads(backend.to_str())
    model, added = described["model"], described["added_tokens"]
    vocab, is_byte_level = model["vocab"], "ByteLevel" in json.dumps(described["decoder"])
    is_list = isinstance(vocab, list)  # by ids
    ids = {text: i for i, (text, _) in enumerate(vocab)} if is_list else dict(vocab)
    names = {}
    for token in added:
        text, token_id = token["content"], token["id"]
        name = _own_name(text, is_byte_level)
        fits = ids.get(name, None if is_list else token_id) == token_id
        fits &= backend.id_to_token(token_id) == text
        if token["special"] or token_id in eos_token_ids or not fits:
            name = HIDDEN + text
        names[text], ids[name] = name, token_id
    if is_list:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    else:
        new = {names[token["content"]]: token["id"] for token in added}
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()} | new
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokens = ({**token, "content": names[token["content"]], "special": True} for token in added)
    special = [token for token in tokens if token["content"].startswith(HIDDEN)]
    return {**described, "added_tokens": special, "truncation": None, "padding": None}


def _own_name(text: str, is_byte_level: bool) -> str:
    """The name that a text has in the vocabulary of a tokenizer's model."""
    if not is_byte_level:
        return text.replace(" ", "\u2581")
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in split.pre_tokenize_str(text))


def _error(matcher: "LLMatcher", tokenizer: "LLTokenizer", asked: StructuredOutputs) -> str:
    """The error of the matcher, or ""."""
    if matcher.is_error():
        error = reason_of(matcher)
        if error.startswith("panic: "):
            return "it has too many parts"
        if asked.grammar is None:  # the error shows a grammar that we have written
            error = PLACE_IN_LARK.sub("", error).partition("\n   1 | ")[0]
        return explained(error, _schemas(asked))
    return _trial(matcher, tokenizer)


def _trial(matcher: "LLMatcher", tokenizer: "LLTokenizer") -> str:
    """Why masks cannot be computed for the first tokens of some text; "" if they can.

    llguidance checks its limits only then. Results are kept, so nothing is computed twice.
    """
    trial, text = matcher.deep_copy(), b""
    for _ in range(TRIAL_TOKENS):
        mask = trial.compute_bitmask()
        if trial.is_error() or trial.is_stopped():
            break
        few = [(one, tokenizer.decode_bytes([one])) for one in _first_tokens(mask, TRIAL_WAYS)]
        if not few:
            break
        token_id, token = next(
            ((i, t) for i, t in few if t.strip()), few[0]
        )  # rather not white space
        text += token
        trial.consume_token(token_id)
    if trial.is_error() and "NoExtension" not in reason_of(trial):
        return f"it is too complex: {reason_of(trial)}"
    if trial.is_error() or (trial.is_stopped() and not trial.is_accepting()):
        shown = shorten(text.decode(errors="replace"))
        return f"nothing can follow {shown}, which it allows" if text else "no text can begin"
    return ""


def _first_tokens(mask: bytes, most: int) -> list[int]:
    """The first tokens that a mask allows: at least one, if it allows any, and about `most`."""
    found: list[int] = []
    rest = mask.lstrip(b"\0")
    while rest and len(found) < most:
        start = 8 * (len(mask) - len(rest))
        found += (start + bit for bit in range(8) if rest[0] >> bit & 1)
        rest = rest[1:].lstrip(b"\0")
    return found


def _schemas(asked: StructuredOutputs) -> Iterable[tuple[str, Any]]:
    """All schemas of a request, with their places."""
    found = [("#", json.loads(asked.json))] if asked.json is not None else []
    if asked.grammar is not None:
        found += schemas_in_lark(asked.grammar)
    if asked.structural_tag is not None:
        found += schemas_in(json.loads(asked.structural_tag))
    return ((root, without_neutral(schema)) for root, schema in found)


def _grammar(asked: StructuredOutputs, tokenizer: "LLTokenizer", added: Mapping[str, int]) -> str:
    """The grammar in llguidance's language."""
    from llguidance import LLMatcher

    if asked.kind in ("json", "json_object"):
        schema = asked.json or '{"type":"object"}'
        if schema == "false":
            raise ValueError("there is nothing that the schema false allows")
        schema = "{}" if schema == "true" else schema
        value = json.loads(schema)
        check_schema(value)
        options: Any = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            _check_whitespace(asked.whitespace_pattern, tokenizer)
            options["whitespace_pattern"] = asked.whitespace_pattern
        written = json.dumps(without_neutral(value), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(written, overrides=options)
    if asked.regex is not None:
        return f"start: TEXT\nTEXT: {pattern_literal(asked.regex)}"
    if asked.choice is not None:
        return f"start: TEXT\nTEXT: {' | '.join(map(literal, asked.choice))}"
    if asked.grammar is not None:
        return lark_of(asked.grammar)
    return tag_grammar(json.loads(asked.structural_tag), added, tokenizer.eos_tokens)


def _check_whitespace(pattern: str, tokenizer: "LLTokenizer") -> None:
    """Refuse a pattern that matches anything but white space: the output would not be JSON."""
    from llguidance import LLMatcher

    try:
        rule = f"{pattern_literal(pattern)} & ~/[ \\t\\r\\n]*/"
    except ValueError as error:
        raise ValueError(f"whitespace_pattern: {error}") from None
    others = LLMatcher(tokenizer, f"start: OTHER\nOTHER: {rule}", log_level=0)
    if not others.is_error():
        others.compute_bitmask()
    if not others.is_error():  # something can begin
        raise ValueError(f"whitespace_pattern: {pattern!r} matches more than [ \\t\\r\\n]*")
    if "NoExtension" not in reason_of(others):
        raise ValueError(f"whitespace_pattern: {reason_of(others)}")
