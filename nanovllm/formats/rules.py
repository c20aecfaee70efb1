"""Quantization: how each linear layer of a model is quantized, by its name in the checkpoint."""

import re
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.formats.names import Names
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import shorten

HEAD = "lm_head"
FIELD = "quantization_config"  # of a model's config


@dataclass(frozen=True)
class Rule:
    """The scheme of the layers for which `pattern` matches the beginning of the name."""

    pattern: re.Pattern[str]
    scheme: Scheme | None  # None: plain weights


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

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of a linear layer, by its usual name; None for plain weights."""
        name = self.names.theirs(name)
        return next((rule.scheme for rule in self.rules if rule.pattern.match(name)), None)

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes that occur."""
        return list(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme))

    @property
    def descriptions(self) -> list[str]:
        """All schemes in words."""
        return [scheme.description for scheme in self.schemes]


NOT_QUANTIZED = Quantization()


def rule(field: str, pattern: str, scheme: Scheme | None) -> Rule:
    """A rule with a pattern of a field."""
    try:
        return Rule(re.compile(pattern), scheme)
    except re.error as error:
        raise ValueError(
            f"{field} must have regular expressions, got {shorten(pattern)}: {error}"
        ) from None


def excluding(names: list[str], scheme: Scheme, head: bool = False) -> tuple[Rule, ...]:
    """The scheme for all layers, except those whose names contain one of `names` as whole words.

    Words are separated by dots. The head is plain unless it is included.
    """
    excluded = [rf"(.*\.)?{any_of(names)}(\.|$)"] if names else []
    if not head:
        excluded.append(f"{HEAD}$")
    rules = [Rule(re.compile(pattern), None) for pattern in excluded]
    return (*rules, Rule(re.compile(""), scheme))


def any_of(names: list[str]) -> str:
    """A pattern for all of these names: it takes as long as one for a single name."""
    return f"(?:{'|'.join(map(re.escape, names))})"
