"""LongText: the next tokens of a long text that a grammar forces, without reading all of it.

llguidance tokenizes the whole text for each mask, which takes 2 us a letter. Here it is the part
that the next tokens can depend on.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONG, PART = 4096, 1024  # bytes: shorter texts are llguidance's; the part that is tokenized
REPEATED = re.compile(r'(?:[{~] ?|"minItems":)(\d{1,9})')


def may_be_long(asked: StructuredOutputs) -> bool:
    """Whether the grammar may force a long text somewhere. A grammar's rules may be repeated."""
    if asked.grammar is not None:
        return True
    text = asked.json or asked.regex or asked.structural_tag or ""
    size: int = asked.size * 3 ** min(text.count("$ref") // 3, LONG.bit_length())
    for number in REPEATED.finditer(text):
        if size > LONG:  # the product of all would have very many digits
            break
        size *= max(1, int(number[1]))
    return size > LONG


class LongText:
    """Tokenizes the start of forced texts."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], tokens_of: Callable[[bytes], list[int]]
    ) -> None:
        self._bytes_of, self._tokens_of = token_bytes, tokens_of

    def tokens(self, matcher: "LLMatcher", last: int | None) -> list[int]:
        """The next tokens after the token `last`; none if the text is short."""
        text = matcher.compute_ff_bytes()
        if len(text) <= LONG or matcher.is_error():
            return []
        part = text[:PART]
        before = b"" if last is None else self._bytes_of(last)
        found = self._tokens_of(before + part)
        if before:  # as llguidance does
            found = found[1:] if found[:1] == [last] else self._tokens_of(part)
        return found[: len(found) // 2]  # what follows the part can change its last tokens
