"""GrammarConstraint: which tokens may come next, by a grammar that llguidance follows."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from nanovllm.engine.schedule.sequence import End, Sequence
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

    That token may have more text: the constraint begins with it, or behind it if it is white space
    that the constraint does not take. `beyond` are tokens that have other text, by how much of the
    marker they need before them: where they would complete it, they may not come.
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
        """After how many of these tokens it ends, which it then has, and the text behind it.

        None if it goes on.
        """
        for number, token_id in enumerate(token_ids, start=1):
            self._last += self._bytes_of(token_id)
            _, found, rest = self._last.partition(self._marker)
            if found:
                return number, rest
            self._last = self._last[-len(self._marker) :]
        return None

    def begin(self, matcher: "LLMatcher", rest: bytes) -> "LLMatcher | None":
        """A copy of the matcher behind the rest of a token; None if that may not come."""
        for text in (rest, rest.lstrip()):
            begun, ids = matcher.deep_copy(), self._tokens_of(text) if text else []
            if begun.try_consume_tokens(ids) == len(ids) and not begun.is_error():
                return begun
        return None

    def barred(self, drafts: Iterable[int]) -> list[int]:
        """The tokens that may not come after these ones."""
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
        """Another one that has read the same."""
        other = FreeText(self._marker, self._bytes_of, self._tokens_of, self._beyond)
        other._last = self._last
        return other


class GrammarConstraint:
    """A follower that allows the tokens that continue the output by a grammar.

    The sequence ends when nothing but its end can follow. `matcher` is at the start of the grammar,
    over `num_tokens` tokens; `excluded` are some that may not come although it allows them. `free`
    is the text before the constraint begins, if there is one, in which `ends` may not come.
    `dead_ends` are the indices at which no token was left to draw: whichever was drawn there ends
    the sequence with an error.
    """

    __slots__ = (
        "_start",
        "_start_text",
        "dead_ends",
        "ends",
        "excluded",
        "free",
        "matcher",
        "num_followed",
        "num_tokens",
        "num_words",
    )
    masks_of = staticmethod(masks_of)
    matcher: "LLMatcher"
    free: FreeText | None  # that has not ended
    num_followed: int  # of the tokens, the prompt included

    def __init__(
        self,
        matcher: "LLMatcher",
        num_tokens: int,
        excluded: Iterable[int] = (),
        free: FreeText | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        self._start, self._start_text = matcher, free
        self.num_tokens, self.num_words = num_tokens, -(-num_tokens // WORD)
        self.excluded, self.ends = tuple(excluded), tuple(ends)
        self.dead_ends: set[int] = set()
        self.reset()

    def copy(self) -> "GrammarConstraint":
        """Another one at its start."""
        start, free = self._start, self._start_text
        return GrammarConstraint(start, self.num_tokens, self.excluded, free, self.ends)

    def reset(self) -> None:
        """Start over: the next `update` follows every token of the output."""
        self.matcher = self._start.deep_copy()
        self.free = self._start_text and self._start_text.copy()
        self.num_followed = 0

    def update(self, seq: Sequence) -> End | None:
        """Follow the tokens that are new. Returns the end that they bring, if any."""
        end = len(seq.token_ids) - seq.num_pending_tokens
        if end == self.num_followed:
            return None
        if end < self.num_followed:  # one was taken back
            self.reset()
        indices = range(max(self.num_followed, seq.num_prompt_tokens), end)
        self.num_followed = end
        if not indices:
            return None
        new = seq.token_ids[indices.start : indices.stop]
        if self.dead_ends and not self.dead_ends.isdisjoint(indices):
            return self._failure()
        if self.free is not None:
            ended = self.free.ends(new)
            if ended is None:
                return None
            begun = self.free.begin(self.matcher, ended[1])
            if begun is None:
                return self._failure()
            self.matcher, self.free, new = begun, None, new[ended[0] :]
        if new and self.matcher.try_consume_tokens(new) < len(new):
            return self._failure()
        return self._end(seq) if self.matcher.is_stopped() else None

    def _end(self, seq: Sequence) -> End | None:
        return STOP if seq.num_known_tokens >= seq.min_num_tokens else None

    def _failure(self) -> End:
        failed = self.matcher.is_error()
        reason = f"structured_outputs: {reason_of(self.matcher)}" if failed else NO_TOKEN
        return End("error", reason)

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that must come after those of `seq`, which are known: `most` at most.

        Those that the tokenizer makes of the only text that can follow, as far as what comes after
        it cannot change them. None in free text, nor where the grammar has failed. A token that
        ends the output is left out: nothing is to be computed after it.
        """
        if self.update(seq) is not None or self.free is not None:
            return []
        matcher = self.matcher.deep_copy()
        found = matcher.compute_ff_tokens()
        tokens = [*itertools.takewhile(lambda i: i not in self.excluded, found[:most])]
        if tokens and matcher.consume_tokens(tokens) and matcher.is_stopped():
            tokens.pop()
        return tokens

    def after(self, drafts: list[int]) -> "LLMatcher | None":
        """The matcher after the drafts, which may be wrong; None if all tokens may come then."""
        if not drafts and self.free is None:  # most often
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
        """The tokens that may not come after the drafts where `after` is None."""
        return (*self.ends, *(self.free.barred(drafts) if self.free is not None else ()))


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in a line or a few."""
    return str(matcher.get_error()).split("\n<state>")[0].strip()
