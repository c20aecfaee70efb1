"""SpeculativeConfig: the validated option that makes an engine guess tokens, by vLLM's names."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import shorten
from nanovllm.utils.option import (
    PATH,
    QUANTIZATION,
    REVISION,
    by_name,
    check_options,
    int_range,
    one_of,
    option,
    required,
)

# The keys of each method, in addition to those of all methods.
METHODS = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model", "revision", "quantization", "max_model_len"),
    "eagle3": ("model", "revision"),
    "mtp": (),
    "grammar": (),
    "none": (),
}
MOST_FORCED = 16  # the default limit of forced tokens of a sequence in a step


@by_name("key")
@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are guessed; docs/speculation.md explains it.

    Keys that `method` does not use have their defaults.
    """

    method: str = required(
        "what guesses: `ngram` looks in the sequence's own text, `draft_model` is a smaller model,"
        " `eagle3` is a head that reads the model's hidden states, `mtp` is the head in the model's"
        " own files, `grammar` only knows the tokens that structured outputs force, `none` drafts"
        " nothing",
        one_of(*METHODS),
    )
    num_speculative_tokens: int = option(4, "most drafts of a sequence and step", int_range(1, 64))
    prompt_lookup_max: int = option(
        4, "tokens at the end of the text that are looked for in it", int_range(1, 32)
    )
    prompt_lookup_min: int = option(1, "fewest tokens that must be found", int_range(1, 32))
    model: str | None = option(
        None, "the draft model's or the head's directory or hub id", PATH, none="no model"
    )
    revision: str | None = option(
        None, "which revision of a hub model to use", REVISION, none="the main branch"
    )
    quantization: str | None = option(
        None, "as the engine's option of that name", QUANTIZATION, none="as the checkpoint is"
    )
    max_model_len: int | None = option(
        None, "longer sequences get no drafts", int_range(2), none="the draft model's own limit"
    )

    @property
    def most_drafts(self) -> int:
        """The most drafts of a sequence in a step, guessed or forced."""
        return 0 if self.method == "none" else self.num_speculative_tokens

    def __post_init__(self) -> None:
        check_options(self)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low > high:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max, got {low} and {high}"
            )
        self._refuse_others()
        if "model" in METHODS[self.method] and self.model is None:
            raise ValueError(f'method "{self.method}" needs "model", a path or a hub id')

    def _refuse_others(self) -> None:
        """Raise for a key of other methods, unless it has its default, as in copies."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in dict.fromkeys(name for names in METHODS.values() for name in names):
            value, methods = (
                getattr(self, name),
                [m for m, names in METHODS.items() if name in names],
            )
            if self.method not in methods and value != defaults[name]:
                raise ValueError(
                    f"{name}={shorten(value)} is a key of method"
                    f" {' or '.join(map(repr, methods))}, not of {self.method!r}"
                )


def check_option(name: str, value: Any, allowed: str) -> SpeculativeConfig:
    """Return the config of a dict, with errors that name the option; return a config as it is.

    `allowed` completes "must be". A dict with a model and without a method has the method
    `draft_model`, as in vLLM. With `grammar` the default number of drafts is the same as in an
    engine without the option.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
    if "method" not in value and "model" in value:
        value = {"method": "draft_model", **value}
    if value.get("method") == "grammar":
        value = {"num_speculative_tokens": MOST_FORCED, **value}
    if "method" not in value:
        raise ValueError(
            f'{name} must have a "method" of {", ".join(METHODS)}, got {shorten(value)}'
        )
    try:
        return SpeculativeConfig(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


ERRORS = (FileNotFoundError, ValueError, TypeError, MemoryError, OSError)


@contextmanager
def errors_name_model(model: str) -> Iterator[None]:
    """A context that adds the option's name and this `model`'s to errors."""
    try:
        yield
    except ERRORS as error:
        kind = next(kind for kind in ERRORS if isinstance(error, kind))
        raise kind(f"speculative_config, {model}: {error}") from error
