"""Sequence: one sample's tokens and state. It knows nothing of block ownership, nor of tensors."""

from enum import Enum, auto
from itertools import count
from typing import Any, NamedTuple, Protocol

import xxhash

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

PENDING = -1  # stands in `token_ids`, whose values go to arrays, for a token in flight


class SequenceStatus(Enum):
    """Where a sequence is in its life; preemption takes it from RUNNING back to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class End(NamedTuple):
    """How a follower ends a sequence. An "error" is a last token that may not be there."""

    reason: FinishReason
    stop_reason: str | None = None


class Follower(Protocol):
    """What is kept beside a sequence's tokens and follows them: a text, counts, a grammar."""

    def update(self, seq: "Sequence") -> End | None:
        """Catch up with the known tokens. Returns the end that they bring, if any."""

    def reset(self) -> None:
        """Drop what an interrupt may have left half done; the next `update` restores it."""


class Sequence:
    """One sample of a request, from prompt to last token.

    State space: `0 <= num_cached_tokens <= num_cached_tokens + num_scheduled_tokens <= num_tokens`.
    The KV of the cached tokens is in the blocks of `block_tables`, one table for each cache group;
    the first `room` tokens have blocks in all groups, and without `room` it holds nothing.
    `state_slots` are for the states of its last tokens; `checkpoints` has, by prefix length, the
    slot that a step in flight fills. The scheduled tokens are those that the step in progress
    computes. The last `num_pending_tokens` are in flight: the step that samples them has been
    launched, and `token_ids` holds `PENDING` in their place. A step with drafts has one of these,
    as one token is sure to come, and at most `num_possible_tokens` more may be accepted. Until then
    lengths are the least that they may be.

    `siblings` are the other samples of its prompt, until the prompt is computed. `followers` are
    the callables, the constraint, the text and the token counts that are kept, if any. A `keeper`
    keeps hidden states. A sequence that `generates` nothing samples no token, and ends when its
    keeper wants no more. Its `adapter` has a `number`, and while it runs a slot on the device;
    prefixes begin from the number.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "bad_words",
        "block_hashes",
        "block_tables",
        "checkpoints",
        "constraint",
        "counts",
        "eos_token_ids",
        "finish_reason",
        "followers",
        "generates",
        "has_filters",
        "index",
        "keeper",
        "logprobs",
        "max_num_tokens",
        "min_num_tokens",
        "must_be_known",
        "narrows",
        "num_cached_tokens",
        "num_hit_tokens",
        "num_passed_blocks",
        "num_pending_tokens",
        "num_possible_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_reported_tokens",
        "num_scheduled_tokens",
        "order",
        "pace",
        "params",
        "processors",
        "reads_tokens",
        "request_id",
        "room",
        "root",
        "seed",
        "seq_id",
        "siblings",
        "state_slots",
        "status",
        "stop_reason",
        "stop_token_ids",
        "temperature",
        "text",
        "token_ids",
    )  # fmt: skip
    _ids = count()

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        request_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        max_model_len: int = 2**31,
        default_seed: int = 0,
        bad_words: tuple[tuple[int, ...], ...] = (),
        text: Any = None,
        counts: Any = None,
        logprobs: Any = None,
        constraint: Any = None,
        adapter: Any = None,
        keeper: Any = None,
        generates: bool = True,
        processors: Any = None,
    ) -> None:
        self.seq_id = next(Sequence._ids)
        self.request_id = self.seq_id if request_id is None else request_id
        self.index = index  # among the samples of its request
        self.siblings: list[Sequence] = []
        self.order = (params.priority, self.seq_id)  # the lower, the sooner it runs
        self.status = SequenceStatus.WAITING
        self.params = params
        self._set_tokens(prompt_token_ids, max_model_len, eos_token_ids)
        self.bad_words = bad_words  # as token ids, each in every way that it may be written
        self.processors = processors
        # Filters beside a constraint.
        self.has_filters = params.narrows or bool(bad_words) or processors is not None
        self.narrows = self.has_filters or constraint is not None
        self.temperature = params.temperature
        self.seed = default_seed if params.seed is None else params.seed
        if index:  # each sample draws from a stream of its own
            self.seed = xxhash.xxh64_intdigest(index.to_bytes(8, "little"), seed=self.seed)
        self.text, self.counts, self.logprobs = text, counts, logprobs
        self.constraint = constraint
        self.adapter = adapter
        self.root = 0 if adapter is None else -adapter.number  # of its prefixes
        self.keeper, self.generates = keeper, generates
        if not generates:
            self.max_num_tokens = self.num_prompt_tokens
        # Whether its draws depend on the tokens before; and whether these, or the reports of its
        # tokens, are prepared for its position.
        self.reads_tokens = (
            params.penalizes or bool(bad_words) or constraint is not None or processors is not None
        )
        asks = keeper is not None or (logprobs is not None and params.logprobs is not None)
        self.must_be_known = self.reads_tokens or asks
        self.pace: Any = None  # of its drafts, from the first one on
        followers: tuple[Follower | None, ...] = (processors, constraint, text, counts)
        self.followers = tuple(follower for follower in followers if follower is not None)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def _set_tokens(
        self, prompt: list[int], max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Start from the prompt, with nothing cached, and set what bounds and ends the output."""
        params = self.params
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.num_possible_tokens = 0
        self.num_hit_tokens: int | None = None  # prefix-cache hits, set on first admission
        # Prompt tokens whose log-probabilities are known; the first one has none. The first sample
        # reports them, if they are asked for.
        asks = params.prompt_logprobs is not None and self.index == 0
        self.num_reported_tokens = 1 if asks else self.num_prompt_tokens
        self.block_hashes: list[int] = []  # of the first full blocks, as far as computed
        self._clear_tables()
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_num_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = self.eos_token_ids.union(params.stop_token_ids or ())

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_cached_tokens} cached"
            f" + {self.num_scheduled_tokens} scheduled of {self.num_tokens} tokens)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """The tokens that are not in flight."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether a prefill computes its next tokens: several, or for siblings or a keeper."""
        left = len(self.token_ids) - self.num_cached_tokens
        if left > 1 or self.siblings:
            return True
        return not self.generates and left > 0

    @property
    def ends_in_flight(self) -> bool:
        """Whether a step in flight computes its last token, or the last states to keep.

        No later step computes it: another sequence may have its place and its table row.
        """
        return len(self.token_ids) >= self.max_num_tokens and not self.is_prefilling

    @property
    def block_table(self) -> list[int]:
        """The first group's block table; most models have no other."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of its tables that it holds, alone or with others."""
        tables = zip(self.block_tables, self.num_passed_blocks, strict=True)
        return [block for table, start in tables for block in table[start:]]

    @property
    def samples(self) -> bool:
        """Whether the scheduled tokens reach the last one, so that the step yields the next."""
        reaches = self.num_cached_tokens + self.num_scheduled_tokens == len(self.token_ids)
        return reaches and self.generates

    @property
    def has_failed(self) -> bool:
        """Whether its callables have failed to make logits for the last known token."""
        return self.processors is not None and self.processors.update(self) is not None

    @property
    def draw_waits(self) -> bool:
        """Whether its next draw or report depends on tokens in flight, or on their number."""
        if not self.num_possible_tokens:
            return bool(self.num_pending_tokens) and self.reads_tokens
        return self.must_be_known or len(self.token_ids) < self.min_num_tokens

    @property
    def ends_by_length(self) -> bool:
        """Whether nothing but its length can end it."""
        return not self.stop_token_ids and not self.params.stop

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need no computing where their KV is cached.

        The last token's logits are needed, and so are those that prompt log-probabilities lack, or
        the hidden states that are wanted of the prompt.
        """
        most = len(self.token_ids) - 1
        if self.keeper is not None and self.keeper.wanted:
            most = min(most, int(self.keeper.wanted.start))
        if self.num_reported_tokens == self.num_prompt_tokens:
            return most
        return min(most, self.num_reported_tokens - 1)

    @property
    def unreported_indices(self) -> range | list[int]:
        """Scheduled tokens whose logits give log-probabilities of the prompt's next tokens.

        If it generates nothing: the last one, once for each label.
        """
        if not self.generates:
            return [*self.keeper.scheduled(self)] * len(self.keeper.labels)
        end = self.num_cached_tokens + self.num_scheduled_tokens
        start = max(self.num_cached_tokens, self.num_reported_tokens - 1)
        return range(start, min(end, self.num_prompt_tokens - 1))

    @property
    def is_narrowed(self) -> bool:
        """Whether the next token is chosen otherwise than from the model's own distribution."""
        return self.narrows or len(self.token_ids) < self.min_num_tokens

    @property
    def may_forbid(self) -> bool:
        """Whether `forbidden_token_ids` has to be asked: else it is empty."""
        return bool(self.bad_words) or len(self.token_ids) < self.min_num_tokens

    def forbidden_token_ids(self, drafts: list[int]) -> set[int]:
        """Tokens that may not come after the `drafts`, or next if there are none.

        The last ones of bad words; before `min_tokens` all stops. Bad words are looked for in the
        output: the prompt's last tokens are no part of one.
        """
        num_tokens = len(self.token_ids) + len(drafts)
        forbidden = set(self.stop_token_ids) if num_tokens < self.min_num_tokens else set()
        if not self.bad_words:
            return forbidden
        start = len(self.token_ids) - max(map(len, self.bad_words))
        output = self.token_ids[max(start, self.num_prompt_tokens) :] + drafts  # its last tokens
        for *before, last in self.bad_words:
            if output[len(output) - len(before) :] == before:
                forbidden.add(last)
        return forbidden

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def follow(self) -> End | None:
        """Update the followers; returns the first end that one of them found."""
        first = None
        for follower in self.followers:
            end = follower.update(self)
            if first is None:
                first = end
        return first

    def drop_pending(self) -> None:
        """Remove the tokens in flight. An interrupt may have left their number wrong."""
        while self.token_ids[-1] == PENDING:
            self.token_ids.pop()
        self.num_pending_tokens = self.num_possible_tokens = 0

    def expect(self, num_tokens: int, num_drafts: int) -> None:
        """Make room for the tokens that a step with drafts has added, in place of the sure one."""
        at = self.num_known_tokens
        self.token_ids[at : at + 1] = [PENDING] * num_tokens
        self.num_pending_tokens += num_tokens - 1
        self.num_possible_tokens -= num_drafts
        if self.room:  # else it was preempted meanwhile
            self.num_cached_tokens += num_tokens - 1

    def release_cache(self) -> None:
        """Go back to nothing computed, tokens kept; the caller frees the blocks."""
        self._clear_tables()
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0

    def _clear_tables(self) -> None:
        self.block_tables: list[list[int]] = []
        self.room = 0
        self.num_published_blocks = 0
        # At the start of each table: freed, as they are behind the group's window.
        self.num_passed_blocks: list[int] = []
        self.state_slots: list[int] = []
        self.checkpoints: dict[int, int] = {}

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sequence; the scheduler frees its blocks."""
        self.drop_pending()
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.status = SequenceStatus.FINISHED  # last: an interrupt may strike anywhere

    def audit(self) -> None:
        """Assert that the state is inside its state space."""
        assert self.num_cached_tokens >= 0 and self.num_scheduled_tokens >= 0, self
        assert self.num_cached_tokens + self.num_scheduled_tokens <= self.num_tokens, self
        assert self.token_ids.count(PENDING) == self.num_pending_tokens, self
        assert self.num_prompt_tokens <= self.num_tokens <= self.max_num_tokens, self
        assert bool(self.room) == (self.status is SequenceStatus.RUNNING), self
        for table, start in zip(self.block_tables, self.num_passed_blocks, strict=True):
            assert 0 <= start <= len(table), self
        assert not self.siblings or self.num_tokens == self.num_prompt_tokens, self
