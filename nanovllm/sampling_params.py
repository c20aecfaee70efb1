"""SamplingParams: how one request is sampled and when it stops."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import (
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_texts,
    shorten,
)

# The least and the largest value, and whether the least is itself left out.
FLOATS = {
    "temperature": (0.0, float("inf"), False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.01, 100.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
MAX_BIAS = 100.0
MAX_SAMPLES = 16_384  # each takes some kilobytes before anything is computed


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. `temperature=0` is greedy; a lower `priority` runs sooner."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for name, (low, high, above) in FLOATS.items():
            self._set(name, check_float(name, getattr(self, name), low, high, above))
        self._set("top_k", check_int("top_k", self.top_k, -1))
        self._set("min_tokens", check_int("min_tokens", self.min_tokens, 0))
        self._set("n", check_int("n", self.n, 1, MAX_SAMPLES))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, check_int(name, getattr(self, name), 0))
        self._set("priority", check_int("priority", self.priority, -(2**63), 2**63 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", check_int("max_tokens", self.max_tokens, 1))
            check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if self.seed is not None:
            self._set("seed", check_int("seed", self.seed, 0, 2**63 - 1))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                self._set(name, check_ids(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must be a list of token ids, not an empty one: []")
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        if self.stop is not None:
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            self._set("stop", check_texts("stop", stops))
        if self.bad_words is not None:
            self._set("bad_words", check_texts("bad_words", self.bad_words))

    @property
    def penalizes(self) -> bool:
        """Whether what was there already counts against a token."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def cuts(self) -> bool:
        """Whether draws come from a part of the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def narrows(self) -> bool:
        """Whether the choice is narrowed at every token, by more than bad words."""
        return bool(self.allowed_token_ids or self.logit_bias) or self.penalizes or self.cuts

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"logit_bias must be a dict from token ids to numbers in [-{MAX_BIAS}, {MAX_BIAS}],"
            f" got {shorten(value)}"
        )
    return {
        check_int("logit_bias token id", token_id, 0): check_float(
            "logit_bias", bias, -MAX_BIAS, MAX_BIAS
        )
        for token_id, bias in value.items()
    }
