"""SamplingParams: how one request is sampled and when it stops."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int, shorten

NOT_BUILT_YET = (
    "top_k", "top_p", "min_p", "min_tokens", "stop", "n", "logprobs", "prompt_logprobs",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens",
    "priority",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. `temperature=0` is greedy.

    Fields named in `NOT_BUILT_YET` raise NotImplementedError when set to anything but their
    default: nothing is accepted and ignored.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", check_float("temperature", self.temperature, 0.0))
        object.__setattr__(self, "max_tokens", check_int("max_tokens", self.max_tokens, 1))
        check_bool("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, 2**63 - 1))
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in NOT_BUILT_YET and value != field.default:
                raise NotImplementedError(
                    f"{field.name}={value!r} is not built yet; leave it at {field.default!r}"
                )


def _token_ids(value: Any) -> tuple[int, ...]:
    """Copy token ids out of the caller's container, so that it can be changed with no effect."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"stop_token_ids must be a list of token ids, got {shorten(value)}")
    return tuple(check_int("stop_token_ids", token_id, 0) for token_id in value)
