"""Quantization: how each linear layer of a model is quantized, by its name in the checkpoint.

A model's config says so, or the option `quantization` does for plain weights. No PyTorch here, and
for plain weights no reader of `quantization_config`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.formats.names import USUAL_NAMES, Names

if TYPE_CHECKING:
    from nanovllm.formats.scheme import Scheme

HEAD = "lm_head"
FIELD = "quantization_config"  # of a model's config
OLD_FIELD = "compression_config"


@dataclass(frozen=True)
class Rule:
    """The scheme of the layers for which `pattern` matches the beginning of the name."""

    pattern: re.Pattern[str]
    scheme: "Scheme | None"  # None: plain weights


@dataclass(frozen=True)
class Quantization:
    """The rules of a model. The first rule that matches a layer applies.

    A layer that no rule matches has plain weights. `files` says which weights the checkpoint's
    files have: only "plain" ones; "quantized" ones where the rules say so; or, where they say so,
    either ("decide"), as the tools that write such checkpoints do not list all plain layers in the
    config. Rules are for the names that the files have.
    """

    method: str | None = None
    rules: tuple[Rule, ...] = ()
    files: Literal["plain", "quantized", "decide"] = "plain"
    names: Names = field(default_factory=Names)

    def scheme(self, name: str) -> "Scheme | None":
        """The scheme of a linear layer, by its usual name; None for plain weights."""
        name = self.names.theirs(name)
        return next((rule.scheme for rule in self.rules if rule.pattern.match(name)), None)

    @property
    def schemes(self) -> "list[Scheme]":
        """All schemes that occur."""
        return list(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme))

    @property
    def descriptions(self) -> list[str]:
        """All schemes in words."""
        return [scheme.description for scheme in self.schemes]


NOT_QUANTIZED = Quantization()


def choose_quantization(
    raw: Mapping[str, Any], option: str | None, names: Names = USUAL_NAMES
) -> Quantization:
    """The quantization that a checkpoint's config describes, else the one that the option names.

    It is a ValueError if the two contradict each other.
    """
    found = NOT_QUANTIZED
    if option or any(raw.get(field) is not None for field in (FIELD, OLD_FIELD)):
        from nanovllm.formats.methods import read_or_make

        found = read_or_make(raw, option)
    return replace(found, names=names)
