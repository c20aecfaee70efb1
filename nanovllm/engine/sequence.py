"""Sequence: one request's tokens and state. It knows nothing of blocks' owners, nor of tensors."""

from enum import Enum, auto
from itertools import count
from typing import Any

import xxhash

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

PENDING = -1
LikelyToken = tuple[int, float, int]  # a token id, its log-probability, and its rank


class SequenceStatus(Enum):
    """Where a sequence is in its life; it may go from RUNNING back to WAITING when preempted."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request, from prompt to last token.

    State space: `0 <= num_cached_tokens <= num_cached_tokens + num_scheduled_tokens <= num_tokens`,
    where the cached tokens are those whose KV is in the blocks of `block_table`, and the scheduled
    ones those that the step in progress computes. The last `num_pending_tokens` are on their way:
    a step that samples them has begun, and what stands in `token_ids` for them is `PENDING`.

    Its `followers` are the other samples of its prompt, as long as they wait for it to be computed.
    """

    __slots__ = (
        "__weakref__",
        "bad_words",
        "block_hashes",
        "block_table",
        "eos_token_ids",
        "finish_reason",
        "followers",
        "index",
        "logprobs",
        "max_num_tokens",
        "min_num_tokens",
        "narrows",
        "num_cached_tokens",
        "num_hit_tokens",
        "num_passed_blocks",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scheduled_tokens",
        "order",
        "params",
        "prompt_logprobs",
        "request_id",
        "seed",
        "seen_tokens",
        "seq_id",
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
    ) -> None:
        self.seq_id = next(Sequence._ids)
        self.request_id = self.seq_id if request_id is None else request_id
        self.index = index  # of its request's samples
        self.followers: list[Sequence] = []
        self.order = (params.priority, self.seq_id)  # the lower, the sooner it runs
        self.status = SequenceStatus.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.num_hit_tokens: int | None = None  # prefix-cache hits, set on first admission
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the leading full blocks, as far as anyone asked
        self.num_published_blocks = 0
        self.num_passed_blocks = 0  # of the table's first: given back, as no window shows them
        self.params = params
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_num_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = self.eos_token_ids.union(params.stop_token_ids or ())
        self.bad_words = bad_words  # as token ids, each in every way that it may be written
        # Of each generated token, by its place in `token_ids`, if they are asked for.
        self.logprobs: dict[int, list[LikelyToken]] = {}
        # Of the prompt's second token, third, ..., as far as they have been computed. The first
        # sample tells of them, if they are asked for.
        asks = params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[list[LikelyToken]] | None = [] if asks else None
        self.text = text  # what follows its tokens, and may find a stop in them; None: nothing does
        self.narrows = params.narrows or bool(bad_words)
        self.seen_tokens: Any = None  # the runner's count of them, if it needs one
        self.temperature = params.temperature
        self.seed = default_seed if params.seed is None else params.seed
        if index:  # a stream of its own
            self.seed = xxhash.xxh64_intdigest(index.to_bytes(8, "little"), seed=self.seed)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

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
        """Those that are not on their way."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of its table that are its own, or that it shares."""
        return self.block_table[self.num_passed_blocks :]

    @property
    def samples(self) -> bool:
        """Whether the scheduled tokens reach the last one, so that the step yields the next."""
        return self.num_cached_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether its next token is drawn with an eye on those before: none may be on its way."""
        return self.params.penalizes or bool(self.bad_words)

    @property
    def ends_by_length(self) -> bool:
        """Whether nothing but its length can end it."""
        return not self.stop_token_ids and not self.params.stop

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need no computing where their KV is cached.

        Not the last, whose logits are needed, nor those whose logits are still to be told.
        """
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens - 1:
            return len(self.token_ids) - 1
        return len(self.prompt_logprobs)

    @property
    def untold_rows(self) -> range:
        """Places of the scheduled tokens whose logits tell of the prompt's next tokens."""
        if self.prompt_logprobs is None:
            return range(0)
        end = self.num_cached_tokens + self.num_scheduled_tokens
        start = max(self.num_cached_tokens, len(self.prompt_logprobs))
        return range(start, min(end, self.num_prompt_tokens - 1))

    @property
    def is_narrowed(self) -> bool:
        """Whether not every token may come next as the model would have it."""
        return self.narrows or len(self.token_ids) < self.min_num_tokens

    def forbidden_token_ids(self) -> set[int]:
        """Tokens that may not come next: those that end bad words, and for a while those that stop.

        A bad word is what is generated: what the prompt ends with is no part of one.
        """
        forbidden = set(self.stop_token_ids) if len(self.token_ids) < self.min_num_tokens else set()
        for *before, last in self.bad_words:
            start = len(self.token_ids) - len(before)
            if start >= self.num_prompt_tokens and self.token_ids[start:] == before:
                forbidden.add(last)
        return forbidden

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def drop_pending(self) -> None:
        """Forget the tokens that are on their way. An interrupt may have left out their number."""
        while self.token_ids[-1] == PENDING:
            self.token_ids.pop()
        self.num_pending_tokens = 0

    def forget_cache(self) -> None:
        """Go back to nothing computed, tokens kept; the blocks are the scheduler's to free."""
        self.block_table = []
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_published_blocks = 0
        self.num_passed_blocks = 0

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the request; its blocks are the scheduler's to free."""
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
        assert 0 <= self.num_passed_blocks <= len(self.block_table), self
        assert bool(self.block_table) == (self.status is SequenceStatus.RUNNING), self
        assert not self.followers or self.num_tokens == self.num_prompt_tokens, self
