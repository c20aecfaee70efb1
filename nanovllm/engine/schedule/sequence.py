"""Sequence: one sample's tokens and progress. It knows no tensors, and no owners of blocks."""

from enum import Enum, auto
from itertools import count

import xxhash

from nanovllm.engine.schedule.parts import End, SequenceParts
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

PENDING = -1  # a token in flight, in `token_ids`; an int, because its values go to arrays


class SequenceStatus(Enum):
    """The phase of a sequence; preemption takes it from RUNNING back to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


FINISHED = SequenceStatus.FINISHED  # looked up once: a member of an Enum takes 50 ns


class Sequence:
    """One sample of a request, from prompt to last token.

    Invariant: `0 <= num_cached_tokens <= num_cached_tokens + num_scheduled_tokens <= num_tokens`.
    The KV of the cached tokens is in the blocks of `block_tables`, one table for each cache group;
    the first `room` tokens have blocks in all groups, and with a `room` of 0 it holds nothing.
    Layers that keep states have slots: `state_slots` for the last tokens, and in `checkpoints`, by
    prefix length, the slots that a step in flight fills.

    The scheduled tokens are those that the step in progress computes. The last `num_pending_tokens`
    are in flight: the step that samples them has been launched, and `token_ids` holds `PENDING` in
    their place. A step that guesses has one pending token, as one token is sure to come, and at
    most `num_possible_tokens` more may be accepted. Until then lengths are the least possible.

    `siblings` are the other samples of its prompt, until the prompt is computed. `parts` has what
    features keep for it. A sequence that does not generate samples no token, and ends when its
    keeper wants no more.
    """

    __slots__ = (  # noqa: RUF023 (by topic)
        "__weakref__", "seq_id", "request_id", "index", "siblings", "order", "status", "params",
        "parts", "followers", "generates", "root", "finish_reason", "stop_reason",
        # Tokens, and how far they are known and computed.
        "token_ids", "num_prompt_tokens", "num_cached_tokens", "num_scheduled_tokens",
        "num_pending_tokens", "num_possible_tokens", "num_hit_tokens", "num_preemptions",
        "min_num_tokens", "max_num_tokens", "eos_token_ids", "stop_token_ids",
        "ends_by_length",
        # What caches keep of the sequence.
        "room", "block_tables", "block_hashes", "num_published_blocks", "num_passed_blocks",
        "state_slots", "checkpoints",
        # How its tokens are drawn and reported.
        "seed", "temperature", "narrows", "has_filters", "reads_tokens", "reports",
        "must_be_known",
    )  # fmt: skip
    _ids = count()

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        first: "Sequence | None" = None,
        eos_token_ids: frozenset[int] = frozenset(),
        max_model_len: int = 2**31,
        default_seed: int = 0,
        parts: SequenceParts | None = None,
    ) -> None:
        self.seq_id = next(Sequence._ids)
        self.request_id: int = self.seq_id if first is None else first.request_id
        self.index = index  # among the samples of its request, after the `first`
        self.siblings: list[Sequence] = []
        self.order = (params.priority, self.seq_id)  # the lower, the sooner it runs
        self.status = SequenceStatus.WAITING
        self.params = params
        self.parts = parts = SequenceParts() if parts is None else parts
        self.followers, self.generates, self.root = parts.followers, parts.generates, parts.root
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._set_tokens(prompt_token_ids, max_model_len, eos_token_ids, first)
        self._set_draws(default_seed)

    def _set_tokens(
        self, prompt: list[int], max_model_len: int, eos: frozenset[int], first: "Sequence | None"
    ) -> None:
        """Start from the prompt, with nothing cached; set the output's bounds and stop tokens."""
        params = self.params
        self.token_ids = prompt.copy()
        self.num_prompt_tokens = len(self.token_ids)
        self.num_pending_tokens = self.num_possible_tokens = 0
        self.num_hit_tokens: int | None = None  # prefix-cache hits, set on first admission
        self.num_preemptions = 0
        self.block_hashes: list[int] = []  # of the first full blocks, as far as computed
        self.release_cache()
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        most = self.num_prompt_tokens + (max_tokens if self.generates else 0)
        self.max_num_tokens = min(most, max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.eos_token_ids = eos = frozenset() if params.ignore_eos else eos
        ends = params.stop_token_ids or ()
        self.stop_token_ids: frozenset[int]  # all samples share the set
        self.stop_token_ids = eos.union(ends) if first is None else first.stop_token_ids
        self.ends_by_length = not self.stop_token_ids and not params.stop  # nothing else ends it

    def _set_draws(self, default_seed: int) -> None:
        """Set how tokens are drawn, and whether draws read the tokens."""
        params, parts = self.params, self.parts
        self.seed = default_seed if params.seed is None else params.seed
        if self.index:  # each sample draws from a stream of its own
            self.seed = xxhash.xxh64_intdigest(self.index.to_bytes(8, "little"), seed=self.seed)
        self.temperature = params.temperature
        is_constrained = parts.constraint is not None
        self.has_filters = params.narrows or parts.filters  # other than a constraint
        self.narrows = self.has_filters or is_constrained
        self.reads_tokens = params.penalizes or parts.filters or is_constrained  # before a draw
        self.reports = parts.logprobs is not None and params.logprobs is not None
        # Whether draws, reports or kept results depend on its position.
        self.must_be_known = self.reads_tokens or self.reports or parts.keeper is not None

    def __repr__(self) -> str:
        tokens = f"{self.num_cached_tokens} + {self.num_scheduled_tokens} of {self.num_tokens}"
        return f"Sequence({self.seq_id}, {self.status.name}, {tokens} tokens)"

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
        """The number of tokens without computed KV; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether a prefill computes its next tokens: several, or one for siblings or a keeper."""
        left = len(self.token_ids) - self.num_cached_tokens
        if left > 1 or self.siblings:
            return True
        return not self.generates and left > 0

    @property
    def ends_in_flight(self) -> bool:
        """Whether a step in flight computes its last token, or the last that its keeper wants.

        No later step computes the sequence: another may get its place and its table row.
        """
        return len(self.token_ids) >= self.max_num_tokens and not self.is_prefilling

    @property
    def num_places(self) -> int:
        """How many places it and its siblings may have in this step."""
        number, samples = 1 + len(self.siblings), self.parts.samples
        return number if samples is None else min(number, samples.most)

    @property
    def block_table(self) -> list[int]:
        """The first group's block table; most models have no other."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that it holds, alone or shared with others."""
        tables = zip(self.block_tables, self.num_passed_blocks, strict=True)
        return [block for table, start in tables for block in table[start:]]

    @property
    def samples(self) -> bool:
        """Whether the scheduled tokens reach the last one, so that the step yields the next."""
        reaches = self.num_cached_tokens + self.num_scheduled_tokens == len(self.token_ids)
        return reaches and self.generates

    @property
    def draw_waits(self) -> bool:
        """Whether its next draw or report depends on tokens in flight, or on their number."""
        if not self.num_possible_tokens:
            return bool(self.num_pending_tokens) and self.reads_tokens
        return self.must_be_known or len(self.token_ids) < self.min_num_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """How many leading tokens need not be computed if their KV is cached.

        The last token's logits are needed, and the prompt tokens that parts want.
        """
        return min([len(self.token_ids) - 1, *self.parts.first_wanted])

    @property
    def is_narrowed(self) -> bool:
        """Whether filters change or restrict the distribution of the next token."""
        return self.narrows or len(self.token_ids) < self.min_num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def follow(self) -> End | None:
        """Update the followers; returns the first end that one of them found."""
        first = None
        for follower in self.followers:
            try:
                end = follower.update(self)
            except BaseException as error:
                from nanovllm.engine.schedule.failures import reason_of_failed

                end = End("error", reason_of_failed(follower, self, error))
            if first is None:
                first = end
        return first

    def drop_pending(self) -> None:
        """Remove the tokens in flight. An interrupt may have left their number wrong."""
        while self.token_ids[-1] == PENDING:
            self.token_ids.pop()
        self.num_pending_tokens = self.num_possible_tokens = 0

    def release_cache(self) -> None:
        """Go back to nothing computed, tokens kept; the caller frees the blocks."""
        self.block_tables: list[list[int]] = []
        self.room = 0
        self.num_published_blocks = 0
        # Freed blocks at the start of each table, which no later token reads.
        self.num_passed_blocks: list[int] = []
        self.state_slots: list[int] = []
        self.checkpoints: dict[int, int] = {}
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sequence; the scheduler frees its blocks."""
        self.drop_pending()
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.status = SequenceStatus.FINISHED  # last: an interrupt may strike anywhere
