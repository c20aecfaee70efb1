"""Constraint: which tokens may come next, by a grammar that llguidance follows."""

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.sequence import End, Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORD = 32  # bits
ALONE = 4  # masks that one thread fills sooner than several
STOP = End("stop")
NO_TOKEN = (
    "structured_outputs leave no token to draw beside the request's other parameters, such as"
    " min_tokens, allowed_token_ids and bad_words"
)


class FreeText:
    """The free text before a constraint: it ends with the token that completes `marker`."""

    def __init__(self, marker: bytes, token_bytes: Any) -> None:
        self._marker, self._bytes_of = marker, token_bytes
        self._last = b""

    def ends(self, token_ids: Iterable[int]) -> int | None:
        """After how many of these tokens it ends, which it then has; None if it goes on."""
        for number, token_id in enumerate(token_ids, start=1):
            self._last += self._bytes_of(token_id)
            if self._marker in self._last:
                return number
            self._last = self._last[-len(self._marker) :]
        return None

    def copy(self) -> "FreeText":
        """Another one that has read the same."""
        other = FreeText(self._marker, self._bytes_of)
        other._last = self._last
        return other


class Constraint:
    """A follower that allows the tokens that continue the output by a grammar.

    The sequence ends when nothing but its end can follow. `matcher` is at the start of the grammar,
    over `num_tokens` tokens; `excluded` are some that may not come although it allows them. `free`
    is the text before the constraint begins, if there is one, in which `ends` may not come.
    `dead_ends` are the indices at which no token was left to draw: whichever was drawn there ends
    the sequence with an error.
    """

    _matcher: "LLMatcher"
    _free: FreeText | None
    _num_tokens: int  # of the output, that are followed

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

    def copy(self) -> "Constraint":
        """Another one at its start."""
        start, free = self._start, self._start_text
        return Constraint(start, self.num_tokens, self.excluded, free, self.ends)

    def reset(self) -> None:
        """Start over: the next `update` follows every token of the output."""
        self._matcher = self._start.deep_copy()
        self._free = self._start_text and self._start_text.copy()
        self._num_tokens = 0

    def update(self, seq: Sequence) -> End | None:
        """Follow the tokens that are new. Returns the end that they bring, if any."""
        number = seq.num_known_tokens - seq.num_prompt_tokens
        if number == self._num_tokens:
            return None
        if number < self._num_tokens:  # one was taken back
            self.reset()
        indices = range(seq.num_prompt_tokens + self._num_tokens, seq.num_known_tokens)
        new = seq.token_ids[indices.start : indices.stop]
        self._num_tokens = number
        if not self.dead_ends.isdisjoint(indices):
            return self._failure()
        if self._free is not None:
            ended = self._free.ends(new)
            if ended is None:
                return None
            self._free, new = None, new[ended:]
        matcher = self._matcher
        if matcher.try_consume_tokens(new) < len(new) or matcher.is_error():
            return self._failure()
        ends = matcher.is_stopped() and seq.num_known_tokens >= seq.min_num_tokens
        return STOP if ends else None

    def _failure(self) -> End:
        failed = self._matcher.is_error()
        reason = f"structured_outputs: {reason_of(self._matcher)}" if failed else NO_TOKEN
        return End("error", reason)

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that must come after those of `seq`, which are known: `most` at most.

        Those that the tokenizer makes of the only text that can follow, as far as what comes after
        it cannot change them. None in free text, nor where the grammar has failed. A token that
        ends the output is left out: nothing is to be computed after it.
        """
        if self.update(seq) is not None or self._free is not None:
            return []
        matcher = self._matcher.deep_copy()
        found = matcher.compute_ff_tokens()
        tokens = [*itertools.takewhile(lambda i: i not in self.excluded, found[:most])]
        if tokens and matcher.consume_tokens(tokens) and matcher.is_stopped():
            tokens.pop()
        return tokens

    def after(self, drafts: list[int]) -> "LLMatcher | None":
        """The matcher after the drafts, which may be wrong; None if all tokens may come then."""
        if self._free is None and not drafts:
            return self._matcher
        if self._free is not None:
            ended = self._free.copy().ends(drafts)
            if ended is None:
                return None
            drafts = drafts[ended:]
        matcher = self._matcher.deep_copy()
        return matcher if matcher.try_consume_tokens(drafts) == len(drafts) else None


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in a line or a few."""
    return str(matcher.get_error()).split("\n<state>")[0].strip()


def fill_masks(asked: list[tuple[Constraint, list[int]]], masks: npt.NDArray[np.int32]) -> set[int]:
    """Write bitmaps of the tokens that each constraint allows after its drafts to `masks` [n, W].

    Bit i % 32 of word i // 32 is set if token i may come. W is the constraints' `num_words`.
    Returns the rows of those that have failed, which allow nothing.
    """
    jobs = [
        (matcher, row)
        for row, (constraint, drafts) in enumerate(asked)
        if (matcher := constraint.after(drafts)) is not None
    ]
    if len({id(matcher) for matcher, _ in jobs}) < len(jobs):  # each is used by one thread
        jobs = [(matcher.deep_copy(), row) for matcher, row in jobs]
    if len(jobs) > ALONE:
        _executor().unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.strides[0], len(masks))
    else:
        for matcher, row in jobs:
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.strides[0])
    failed = {row for matcher, row in jobs if matcher.is_error()}
    for row in failed:  # llguidance lets the text end where it cannot go on
        masks[row] = 0
    free = {*range(len(asked))}.difference(row for _, row in jobs)
    if free:
        masks[sorted(free)] = -1
    forbid(
        masks,
        (
            (row, constraint.ends if row in free else constraint.excluded)
            for row, (constraint, _) in enumerate(asked)
        ),
    )
    return failed


def forbid(masks: npt.NDArray[np.int32], ids_of_rows: Iterable[tuple[int, Iterable[int]]]) -> None:
    """Clear the bits of tokens of some rows."""
    pairs = [(row, token_id) for row, ids in ids_of_rows for token_id in ids]
    if pairs:
        rows, ids = np.array(pairs, np.int64).T
        bits = np.uint32(1) << (ids % WORD).astype(np.uint32)
        np.bitwise_and.at(masks.view(np.uint32), (rows, ids // WORD), ~bits)


def keep_only(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> None:
    """Clear the bits of all other tokens in one row."""
    kept = np.full((1, len(mask)), -1, np.int32)
    forbid(kept, [(0, ids)])
    mask &= ~kept[0]


def is_empty(mask: npt.NDArray[np.int32], vocab_size: int) -> bool:
    """Whether it allows none of the first `vocab_size` tokens."""
    whole, rest = divmod(vocab_size, WORD)
    return not mask[:whole].any() and not (rest and mask[whole] & ((1 << rest) - 1))


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
