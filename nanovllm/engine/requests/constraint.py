"""Constraint: which tokens may come next, by a grammar that llguidance follows."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nanovllm.engine.batch import Batch
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
    _is_ahead: bool  # whether the matcher has one more, which `take` gave it

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
        self._num_tokens, self._is_ahead = 0, False

    def update(self, seq: Sequence) -> End | None:
        """Follow the tokens that are new. Returns the end that they bring, if any."""
        number = len(seq.token_ids) - seq.num_pending_tokens - seq.num_prompt_tokens
        if number == self._num_tokens:
            return None
        if number < self._num_tokens:  # one was taken back
            self.reset()
        indices = range(seq.num_prompt_tokens + self._num_tokens, seq.num_known_tokens)
        new = seq.token_ids[indices.start : indices.stop]
        self._num_tokens = number
        if self.dead_ends and not self.dead_ends.isdisjoint(indices):
            return self._failure()
        if self._free is not None:
            ended = self._free.ends(new)
            if ended is None:
                return None
            begun = self._free.begin(self._matcher, ended[1])
            if begun is None:
                return self._failure()
            self._matcher, self._free, new = begun, None, new[ended[0] :]
        matcher = self._matcher
        if self._is_ahead:
            self._is_ahead, new = False, new[1:]
        if new and matcher.try_consume_tokens(new) < len(new):
            return self._failure()
        ends = matcher.is_stopped() and seq.num_known_tokens >= seq.min_num_tokens
        return STOP if ends else None

    def may_take(self, seq: Sequence) -> bool:
        """Whether `take` may give it the next token: it has all others, and that one is allowed."""
        number = len(seq.token_ids) - seq.num_pending_tokens - seq.num_prompt_tokens
        return number == self._num_tokens and self._free is None and not self.dead_ends

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
            begun, drafts = self._free.begin(self._matcher, ended[1]), drafts[ended[0] :]
            if begun is None:
                return None
            return begun if begun.try_consume_tokens(drafts) == len(drafts) else None
        matcher = self._matcher.deep_copy()
        return matcher if matcher.try_consume_tokens(drafts) == len(drafts) else None

    def barred(self, drafts: list[int]) -> tuple[int, ...]:
        """The tokens that may not come after the drafts where `after` is None."""
        return (*self.ends, *(self._free.barred(drafts) if self._free is not None else ()))


def take(batch: Batch, token_ids: list[int]) -> None:
    """Give the matchers of constraints a step's tokens, several at a time.

    It is for speed alone: `update`, when a token is known, does what is left, or all of it.
    """
    if batch.drafts or batch.num_drafts:  # not all tokens are sure to come
        return
    given = [
        (seq.constraint, token_id)
        for seq, token_id in zip(batch.sampling_seqs, token_ids, strict=True)
        if seq.constraint is not None and seq.num_pending_tokens and seq.constraint.may_take(seq)
    ]
    if len(given) <= ALONE:
        return
    jobs = [(constraint._matcher, token_id) for constraint, token_id in given]
    for (constraint, _), taken in zip(given, _executor().consume_token_par(jobs), strict=True):
        if taken:
            constraint._is_ahead = True
        else:  # `update` finds out why
            constraint.reset()


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in a line or a few."""
    return str(matcher.get_error()).split("\n<state>")[0].strip()


def fill_masks(asked: list[tuple[Constraint, list[int]]], masks: npt.NDArray[np.int32]) -> set[int]:
    """Write bitmaps of the tokens that each constraint allows after its drafts to `masks` [n, W].

    Bit i % 32 of word i // 32 is set if token i may come. W is the constraints' `num_words`.
    Returns the rows of those that have failed, which allow nothing.
    """
    jobs, free = [], []
    rows_without: dict[tuple[int, ...], list[int]] = {}
    for row, (constraint, drafts) in enumerate(asked):
        without = constraint.excluded
        if (matcher := constraint.after(drafts)) is not None:
            jobs.append((matcher, row))
        else:
            free.append(row)
            without = constraint.barred(drafts)
        if without:
            rows_without.setdefault(without, []).append(row)
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
    masks[free] = -1
    for ids, rows in rows_without.items():
        for token_id in ids:
            masks.view(np.uint32)[rows, token_id // WORD] &= ~np.uint32(1 << token_id % WORD)
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


def note_dead_ends(
    draws: list[tuple[Sequence, list[int]]],
    masks: npt.NDArray[np.int32],
    doubtful: set[int],
    vocab_size: int,
) -> None:
    """Note where the rows of constraints leave no token; only `doubtful` rows can.

    A token that stops nothing is drawn there.
    """
    noted = {row for row, (seq, _) in enumerate(draws) if seq.constraint.dead_ends}
    for row in noted.union(doubtful):
        seq, drafts = draws[row]
        dead_ends, index = seq.constraint.dead_ends, len(seq.token_ids) + len(drafts)
        if row in doubtful and is_empty(masks[row], vocab_size):
            dead_ends.add(index)
            token_id = next(i for i in itertools.count() if i not in seq.stop_token_ids)
            masks.view(np.uint32)[row, token_id // WORD] = np.uint32(1 << token_id % WORD)
        else:
            dead_ends.discard(index)


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()
