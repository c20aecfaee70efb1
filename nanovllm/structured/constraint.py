"""GrammarConstraint: which tokens may come next, by a grammar that llguidance follows."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from nanovllm.engine.schedule.parts import End
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.long_text import LongText
from nanovllm.structured.masks import WORD, masks_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

STOP = End("stop")
NO_TOKEN = (
    "structured_outputs leave no token to draw beside the request's other parameters, such as"
    " min_tokens, allowed_token_ids and bad_words"
)


class FreeText:
    """The free text before a constraint: it ends with the token that completes `marker`.

    That token may have more text after the marker. The constraint begins with this text, or after
    it if it is white space that the constraint does not allow. `beyond` are tokens with other text
    after the marker, by how much of the marker must come before them: they are not allowed where
    they would complete the marker.
    """

    def __init__(
        self,
        marker: bytes,
        token_bytes: Callable[[int], bytes],
        tokens_of: Callable[[bytes], list[int]],
        beyond: Mapping[int, tuple[int, ...]],
    ) -> None:
        self._marker, self._beyond = marker, beyond
        self._bytes_of, self._tokens_of = token_bytes, tokens_of
        self._last = b""

    def ends(self, token_ids: Iterable[int]) -> tuple[int, bytes] | None:
        """Read these tokens until the marker is complete.

        Returns the number of tokens that complete it, and the text after it; None if it goes on.
        """
        for number, token_id in enumerate(token_ids, start=1):
            self._last += self._bytes_of(token_id)
            _, found, rest = self._last.partition(self._marker)
            if found:
                return number, rest
            self._last = self._last[-len(self._marker) :]
        return None

    def begin(self, matcher: "LLMatcher", rest: bytes) -> "LLMatcher | None":
        """A copy of the matcher after the rest of a token; None if the grammar forbids it."""
        for text in (rest, rest.lstrip()):
            begun, ids = matcher.deep_copy(), self._tokens_of(text) if text else []
            if begun.try_consume_tokens(ids) == len(ids) and not begun.is_error():
                return begun
        return None

    def barred(self, drafts: Iterable[int]) -> list[int]:
        """The tokens that are not allowed after these drafts."""
        free = self
        if drafts:
            free = self.copy()
            free.ends(drafts)
        return [
            token_id
            for length, ids in self._beyond.items()
            if free._last.endswith(self._marker[:length])
            for token_id in ids
        ]

    def copy(self) -> "FreeText":
        """A copy that has read the same text."""
        other = FreeText(self._marker, self._bytes_of, self._tokens_of, self._beyond)
        other._last = self._last
        return other


class GrammarConstraint:
    """A follower that allows the tokens that continue the output by a grammar.

    The sequence ends when the grammar allows only its end. `matcher` is at the start of the
    grammar, over `num_tokens` tokens; `excluded` are tokens that are forbidden although it allows
    them. `free` is the free text before the constraint, if there is one; the tokens `ends` are
    forbidden in it.
    """

    __slots__ = (
        "_ahead",
        "_last",
        "_start",
        "_start_text",
        "ends",
        "excluded",
        "free",
        "long",
        "matcher",
        "num_followed",
        "num_tokens",
        "num_words",
    )
    masks_of = staticmethod(masks_of)
    matcher: "LLMatcher"
    free: FreeText | None  # None after its end
    num_followed: int  # tokens that were read, including the prompt

    def __init__(
        self,
        matcher: "LLMatcher",
        num_tokens: int,
        excluded: Iterable[int] = (),
        free: FreeText | None = None,
        ends: Iterable[int] = (),
        long: LongText | None = None,
    ) -> None:
        self._start, self._start_text, self.long = matcher, free, long
        self.num_tokens, self.num_words = num_tokens, -(-num_tokens // WORD)
        self.excluded, self.ends = tuple(excluded), tuple(ends)
        self.reset()

    def copy(self) -> "GrammarConstraint":
        """A new constraint at its start."""
        start, free = self._start, self._start_text
        return GrammarConstraint(start, self.num_tokens, self.excluded, free, self.ends, self.long)

    def reset(self) -> None:
        """Start over: the next `update` follows every token of the output."""
        self.matcher = self._start.deep_copy()
        self.free = self._start_text and self._start_text.copy()
        self.num_followed = 0
        self._last: int | None = None  # the last token that the matcher has
        self._ahead: list[int] | None = None  # tokens of a long text; None: not known

    def update(self, seq: Sequence) -> End | None:
        """Follow new tokens. Returns the end of the sequence if they bring it."""
        end = len(seq.token_ids) - seq.num_pending_tokens
        if end == self.num_followed:
            return None
        if end < self.num_followed:  # a token was removed again
            self.reset()
        indices = range(max(self.num_followed, seq.num_prompt_tokens), end)
        self.num_followed, self._ahead = end, None
        if not indices:
            return None
        new = seq.token_ids[indices.start : indices.stop]
        if self.free is not None:
            ended = self.free.ends(new)
            if ended is None:
                return None
            begun = self.free.begin(self.matcher, ended[1])
            if begun is None:
                return End("error", self.failure)
            self.matcher, self.free, new = begun, None, new[ended[0] :]
            if ended[1] and not new:  # the matcher has a part of the last token
                self._ahead = []
        if new and self.matcher.try_consume_tokens(new) < len(new):
            return End("error", self.failure)
        if new:
            self._last = new[-1]
        return self._end(seq) if self.matcher.is_stopped() else None

    def _end(self, seq: Sequence) -> End | None:
        return STOP if seq.num_known_tokens >= seq.min_num_tokens else None

    @property
    def failure(self) -> str:
        """Why no token can come."""
        failed = self.matcher.is_error()
        return f"structured_outputs: {reason_of(self.matcher)}" if failed else NO_TOKEN

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that must come next, at most `most`. All tokens of `seq` are known.

        These are the tokens that the tokenizer makes of the only text that can follow, up to the
        last token that later text cannot change. There are none in free text, or if the grammar has
        failed. A token that ends the output is left out, because nothing is computed after it.
        """
        if self.update(seq) is not None or self.free is not None:
            return []
        if ahead := self.ahead():
            return [*itertools.takewhile(lambda i: i not in self.excluded, ahead[:most])]
        matcher = self.matcher.deep_copy()
        found = matcher.compute_ff_tokens()
        tokens = [*itertools.takewhile(lambda i: i not in self.excluded, found[:most])]
        if tokens and matcher.consume_tokens(tokens) and matcher.is_stopped():
            tokens.pop()
        return tokens

    def ahead(self) -> list[int]:
        """The next tokens of a long text that the grammar forces; none if there is no such text."""
        if self.long is None or self.free is not None:
            return []
        if self._ahead is None:
            self._ahead = self.long.tokens(self.matcher, self._last)
        return self._ahead

    def sole(self, drafts: list[int]) -> int | None:
        """The only token that is allowed after the drafts, if all are of a long text."""
        ahead = self.ahead()
        if len(drafts) >= len(ahead) or drafts != ahead[: len(drafts)]:
            return None
        return ahead[len(drafts)]

    def after(self, drafts: list[int]) -> "LLMatcher | None":
        """The matcher after the drafts, which may be wrong; None if all tokens are allowed then."""
        if not drafts and self.free is None:  # the usual case
            return self.matcher
        if self.free is not None:
            ended = self.free.copy().ends(drafts)
            if ended is None:
                return None
            begun, drafts = self.free.begin(self.matcher, ended[1]), drafts[ended[0] :]
            if begun is None:
                return None
            return begun if begun.try_consume_tokens(drafts) == len(drafts) else None
        matcher = self.matcher.deep_copy()
        return matcher if matcher.try_consume_tokens(drafts) == len(drafts) else None

    def barred(self, drafts: list[int]) -> tuple[int, ...]:
        """The tokens that are not allowed after the drafts, if `after` is None."""
        return (*self.ends, *(self.free.barred(drafts) if self.free is not None else ()))


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in one or a few lines."""
    return str(matcher.get_error()).split("\n<state>")[0].strip()
