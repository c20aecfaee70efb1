"""SpeculativeConfig: the option that makes an engine guess tokens, by vLLM's names, validated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import shorten
from nanovllm.utils.option import (
    Rule,
    by_name,
    check_options,
    int_range,
    one_of,
    option,
    required,
)

METHODS = ("ngram",)
AN_OBJECT = 'a dict such as {"method": "ngram", "num_speculative_tokens": 4}'


@by_name("key", {})
@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are guessed; docs/speculation.md explains it."""

    method: str = required(
        "what guesses: `ngram` looks in the sequence's own text", one_of(*METHODS)
    )
    num_speculative_tokens: int = option(4, "most drafts of a sequence and step", int_range(1, 64))
    prompt_lookup_max: int = option(
        4, "tokens at the end of the text that are looked for in it", int_range(1, 32)
    )
    prompt_lookup_min: int = option(1, "fewest tokens that must be found", int_range(1, 32))

    def __post_init__(self) -> None:
        check_options(self)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low > high:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max, got {low} and {high}"
            )


def check_speculation(name: str, value: Any) -> SpeculativeConfig:
    """Return the config of a dict, whose errors name the option; a config is returned as it is."""
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be {AN_OBJECT}, got {shorten(value)}")
    if "method" not in value:
        raise ValueError(
            f'{name} must have a "method" of {", ".join(METHODS)}, got {shorten(value)}'
        )
    try:
        return SpeculativeConfig(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


SPECULATION = Rule(check_speculation, AN_OBJECT)
