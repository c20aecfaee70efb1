"""BoundedConstraint: a constraint after free text of bounded length, such as reasoning."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.engine.schedule.parts import End
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.constraint import FreeText, GrammarConstraint
from nanovllm.structured.long_text import LongText

if TYPE_CHECKING:
    from llguidance import LLMatcher


class NoLongText:
    """Stands for the long texts of a grammar that has none, so that `sole` is asked."""

    def tokens(self, *_: Any) -> list[int]:
        """No tokens."""
        return []


class BoundedConstraint(GrammarConstraint):
    """Forces the tokens `marker` when the free text has `most` tokens, if it has not ended by then.

    If the constraint `is_open`, any text may follow the free text, and `matcher` is not used.
    """

    __slots__ = ("_is_open", "_marker", "_most", "_num_free")
    free: FreeText | None

    def __init__(
        self,
        matcher: Any,
        num_tokens: int,
        excluded: Iterable[int],
        free: FreeText | None,
        ends: Iterable[int],
        long: LongText | None,
        most: int,
        marker: list[int],
        is_open: bool,
    ) -> None:
        self._most, self._marker, self._is_open = most, marker, is_open
        self._num_free: int | None = 0  # tokens of the free text; None after its end
        known: Any = NoLongText() if long is None else long
        super().__init__(matcher, num_tokens, excluded, free, ends, known)

    def copy(self) -> "BoundedConstraint":
        """A new constraint at its start."""
        return BoundedConstraint(
            self._start, self.num_tokens, self.excluded, self._start_text, self.ends, self.long,
            self._most, self._marker, self._is_open,
        )  # fmt: skip

    def reset(self) -> None:
        """Start over: the next `update` follows every token of the output."""
        self._num_free = 0
        if not self._is_open:
            super().reset()
            return
        self.matcher, self.num_followed = self._start, 0
        self.free = self._start_text and self._start_text.copy()
        self._last, self._ahead = None, None

    def update(self, seq: Sequence) -> End | None:
        """Follow new tokens. Returns the end of the sequence if they bring it."""
        if not self._is_open:
            ended = super().update(seq)
            number = self.num_followed - seq.num_prompt_tokens
            self._num_free = None if self.free is None else max(0, number)
            return ended
        end = len(seq.token_ids) - seq.num_pending_tokens
        if end < self.num_followed:  # a token was removed again
            self.reset()
        first = max(self.num_followed, seq.num_prompt_tokens)
        if first < end and self._num_free is not None:
            assert self.free is not None
            new = seq.token_ids[first:end]
            over = self.free.ends(new) is not None
            self._num_free = None if over else self._num_free + len(new)
        self.num_followed = end
        return None

    def sole(self, drafts: list[int]) -> int | None:
        """The only token that is allowed after the drafts: of the marker, or of a long text."""
        if self._num_free is None:
            return None if self._is_open else super().sole(drafts)
        place = self._num_free + len(drafts) - self._most
        if not 0 <= place < len(self._marker):
            return None
        assert self.free is not None
        has_ended = drafts and self.free.copy().ends(drafts) is not None
        return None if has_ended else self._marker[place]

    def barred(self, drafts: list[int]) -> tuple[int, ...]:
        """The tokens that are not allowed after the drafts, if `after` is None."""
        return () if self._is_open else super().barred(drafts)

    def after(self, drafts: list[int]) -> "LLMatcher | None":
        """The matcher after the drafts, which may be wrong; None if all tokens are allowed then."""
        return None if self._is_open else super().after(drafts)
