"""Extras: checks and makes what goes beyond plain sampling. Imported when first asked for."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.engine.requests.bad_words import BadWords
from nanovllm.engine.requests.logprobs import Logprobs
from nanovllm.engine.requests.processors import Processors
from nanovllm.engine.requests.report_limit import ReportLimit
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:
    from nanovllm.engine.features import Features
    from nanovllm.engine.requests.parts import Constraint, Constraints


class UncachedParts(SequenceParts):
    """The parts of a sequence that reads no cached prefix: all its tokens are wanted."""

    @property
    def first_wanted(self) -> list[int]:
        """The first token."""
        return [0]


TOGETHER = 64  # bad words are tokenized before another thread may go on: about a millisecond


class Extras:
    """Checks lists of tokens and words against the model, and makes parts of sequences."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        features: "Features",
        logprobs_mode: str = "raw_logprobs",
        policy: str = "priority",
    ) -> None:
        self.tokenizer, self._features = tokenizer, features
        self._mode, self._policy = logprobs_mode, policy
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids
        self._constraints: Constraints | None = None  # made when one is first asked for
        self._report_limit = ReportLimit()

    def check(self, params: SamplingParams) -> None:
        """Check the parameters that depend on the model and its tokenizer."""
        last = self.vocab_size - 1
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, last + 1)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_int(f"{name}: a token id", max(getattr(params, name) or (0,)), 0, last)
        for name in ("bad_words", "stop"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(
                    f"{name}: there is no text, as the model directory has no tokenizer; pass"
                    " tokenizer=... when the engine is made"
                )
        if params.logprobs is not None and params.logits_processors and "raw" not in self._mode:
            raise ValueError(
                "logprobs must be None with logits_processors where logprobs_mode is"
                f" {self._mode!r}: callables would be called twice, got {params.logprobs}"
            )
        if params.priority and self._policy == "fcfs":
            raise ValueError(
                f"priority must be 0 with scheduling_policy='fcfs', got {params.priority};"
                " leave the policy out to use priorities"
            )
        asks = params.stop_token_ids and params.min_tokens
        stopping = self._stopping(params) if asks else ()
        if len(stopping) >= self.vocab_size:
            raise ValueError(
                "min_tokens needs tokens that do not stop, but stop_token_ids and EOS are all"
                f" {self.vocab_size} tokens; got min_tokens={params.min_tokens}"
            )

    def _check_allowed(self, params: SamplingParams, words: BadWords | None) -> None:
        """Raise if no token of the list may come first."""
        left = set(params.allowed_token_ids or ())
        if params.min_tokens:
            left -= self._stopping(params)
        left -= frozenset() if words is None else words.alone
        if not left:
            raise ValueError(
                "allowed_token_ids must hold more than bad_words, and with min_tokens more than"
                f" tokens that stop, got {shorten(params.allowed_token_ids)}"
            )

    def _stopping(self, params: SamplingParams) -> set[int]:
        """The tokens that stop a request."""
        return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}

    def bad_words(self, params: SamplingParams) -> BadWords | None:
        """The bad words as token ids, both at the start of a text and after another word.

        Words with ids outside the model's vocabulary cannot come, and are left out. Raises if they
        leave none of the allowed tokens.
        """
        texts = (start + word.lstrip(" ") for word in params.bad_words or () for start in ("", " "))
        words = []
        for number, text in enumerate(texts):
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if ids and max(ids) < self.vocab_size:
                words.append(ids)
            if not number % TOGETHER:
                time.sleep(0)  # the engine's steps go on
        bad_words = BadWords(words) if words else None
        if params.allowed_token_ids is not None:
            self._check_allowed(params, bad_words)
        return bad_words

    def compiles(self, params: SamplingParams) -> bool:
        """Whether the constraint for `structured_outputs` is not compiled yet."""
        asked = params.structured_outputs
        assert not isinstance(asked, Mapping), "SamplingParams has checked it"
        return asked is not None and (self._constraints is None or not self._constraints.has(asked))

    def constraint(self, params: SamplingParams) -> "Constraint | None":
        """The constraint for `structured_outputs`, if there are any; raises if they are wrong."""
        asked = params.structured_outputs
        if asked is None:
            return None
        assert not isinstance(asked, Mapping), "SamplingParams has checked it"
        if self._constraints is None:
            self._constraints = self._features.constraints(
                self.tokenizer, self.vocab_size, self.eos_token_ids
            )
        return self._constraints.constraint(asked, () if params.ignore_eos else self.eos_token_ids)

    def parts(
        self, params: SamplingParams, constraint: "Constraint | None", num_tokens: int, index: int
    ) -> SequenceParts:
        """The parts that a sample keeps for its extras; its prompt has `num_tokens`."""
        parts = SequenceParts()
        if params.skip_reading_prefix_cache:
            parts = UncachedParts()
        if params.penalizes:
            parts.counts = TokenCounts()
        if constraint is not None:
            parts.constraint = constraint.copy()
        if params.logits_processors:
            parts.processors = Processors(params.logits_processors)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            of_prompt = params.prompt_logprobs is not None and index == 0  # one sample has them
            parts.logprobs = Logprobs(num_tokens if of_prompt else 0, self._report_limit)
            parts.logprobs.mode = self._mode
        if params.hidden_states:
            parts.keeper = self._features.keeper(num_tokens, keeps_prompt=index == 0)
        return parts
