"""FairAdmission: neither running sequences nor short prompts wait until a long one is computed.

Loaded with `scheduling="fair"`, or with `long_prefill_token_threshold`.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from nanovllm.engine.schedule.admission import Admission, num_decoding, schedule_tokens
from nanovllm.engine.schedule.sequence import Sequence

# While sequences wait for their next token, prompts get 1 / PART of a step's tokens, or LEAST.
PART, LEAST = 4, 256


class FairAdmission(Admission):
    """Bounds what prompts get of a step; if steps are not mixed, sequences decode after each one.

    With `scheduling="fair"`, prompts get fewer tokens while sequences wait for their next one. A
    prompt is long if it has more tokens left than a step computes. While a shorter one waits, a
    long one gets half of the tokens that are left in a step, and the first long one gets the rest
    when all others have theirs.

    With a threshold, no prompt gets more tokens of a step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_fair = self.config.scheduling == "fair"
        self._most = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
        self.least = LEAST
        self._num_tokens = 0  # for the prompts of this step
        self._halved: Sequence | None = None  # the first long prompt of this step
        if self._is_fair:
            self.turns.most_starts = 0

    def budget(self, num_tokens: int, running: Iterable[Sequence]) -> int:
        """How many of `num_tokens` the next step may use for prompts."""
        if self._is_fair and num_decoding(running):
            most = max(self.least, self.config.max_num_batched_tokens // PART)
            num_tokens = min(num_tokens, most)
        self._num_tokens, self._halved = num_tokens, None
        return num_tokens

    def share(
        self, seq: Sequence, budget: int, prompts: list[Sequence], running: Iterable[Sequence]
    ) -> int:
        """How many tokens of a step's budget `seq` may get, after the step's other `prompts`."""
        share = min(super().share(seq, budget, prompts, running), self._most)
        if self._is_fair and self._is_long(seq) and self._shorter_waits(running):
            self._halved = self._halved or seq
            share = min(share, -(-budget // 2))
        return share

    def fork(
        self, running: deque[Sequence], prompts: list[Sequence]
    ) -> list[tuple[Sequence, Sequence]]:
        """Give the tokens that the step's `prompts` leave to the first long one; then fork."""
        left = self._num_tokens - sum(seq.num_scheduled_tokens for seq in prompts)
        for seq in prompts:
            if seq is self._halved and seq.parts.logprobs is None:  # they have a limit of their own
                most = min(seq.num_scheduled_tokens + left, self._most)
                schedule_tokens(seq, most, self.caches)
        return super().fork(running, prompts)

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_uncached_tokens > self._num_tokens

    def _shorter_waits(self, running: Iterable[Sequence]) -> bool:
        """Whether a prompt that is not long has got no tokens of this step yet."""
        begun = (seq for seq in running if seq.is_prefilling)
        waiting = self.waiting if self.may_admit(running) else ()
        others = (seq for seq in chain(begun, waiting) if not seq.num_scheduled_tokens)
        return not all(map(self._is_long, others))
