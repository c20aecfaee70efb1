"""BeamSearchParams: parameters of a search for the most likely outputs."""

from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_float, shorten
from nanovllm.utils.option import (
    TRUE_OR_FALSE,
    Rule,
    by_name,
    check_options,
    float_range,
    int_range,
    option,
)


def _check_early_stopping(name: str, value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if value != "never":
        raise TypeError(f"{name} must be {EARLY.allowed}, got {shorten(value)}")
    return "never"


def _check_temperature(name: str, value: Any) -> float:
    if check_float(name, value, 0.0) != 0.0:
        raise ValueError(f"{name} must be 0.0, as nothing is drawn at random, got {value}")
    return 0.0


EARLY = Rule(_check_early_stopping, "True, False or 'never'")
NO_TEMPERATURE = Rule(_check_temperature, "0.0")
MOST_PENALTY = 30  # 2^31 tokens to this power are less than the largest float


@by_name("parameter of beam search")
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with the names of vLLM and transformers."""

    beam_width: int = option(4, "how many sequences are kept, and returned", int_range(1))
    max_tokens: int = option(64, "most tokens to generate", int_range(1))
    ignore_eos: bool = option(False, "continue after end-of-text tokens", TRUE_OR_FALSE)
    temperature: float = option(0.0, "nothing is drawn at random", NO_TEMPERATURE)
    length_penalty: float = option(
        1.0,
        "a sequence's score is its log-probability divided by this power of the number of its"
        " generated tokens; above 0 it favors longer ones",
        float_range(-MOST_PENALTY, MOST_PENALTY),
    )
    early_stopping: bool | str = option(
        False,
        "when a search ends: `True` as soon as `beam_width` sequences have ended, `False` when no"
        " running one is likely to become better than these, `'never'` when none can",
        EARLY,
    )
    include_stop_str_in_output: bool = option(
        False, "leave the end-of-text token in `tokens` and `text`", TRUE_OR_FALSE
    )

    def __post_init__(self) -> None:
        check_options(self)
