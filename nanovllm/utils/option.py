"""Options: dataclass fields that carry a help text and a rule for their values.

The check of a value, `--help` and docs/options.md are all made from this one description.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nanovllm.utils.checks import (
    allowed_choices,
    allowed_range,
    check_bool,
    check_choice,
    check_float,
    check_int,
)

T = TypeVar("T")
NOTHING = "none"  # what None means where it sets nothing


@dataclass(frozen=True)
class Rule:
    """Which values an option takes.

    `check(name, value)` raises, or returns the value to keep; `allowed` completes "must be ...".
    """

    check: Callable[[str, Any], Any]
    allowed: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """What a field's metadata holds. `none` says what None means; without it None is refused."""

    help: str
    rule: Rule
    none: str | None = None

    def check(self, name: str, value: Any) -> Any:
        """Return the value to keep; TypeError or ValueError if it is not allowed."""
        if value is None and self.none is not None:
            return None
        return self.rule.check(name, value)


def option(default: T, help: str, rule: Rule, none: str | None = None) -> T:  # noqa: A002
    """A dataclass field with a default."""
    return dataclasses.field(default=default, metadata={"option": Option(help, rule, none)})


def required(help: str, rule: Rule) -> Any:  # noqa: A002
    """A dataclass field without a default."""
    return dataclasses.field(metadata={"option": Option(help, rule)})


@functools.cache
def options_of(kind: Any) -> dict[str, Option]:
    """The options of a dataclass whose fields are all made by `option` or `required`, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


def check_options(instance: Any) -> None:
    """Check every field of a frozen dataclass, and keep the values that the rules return."""
    kind: Any = type(instance)
    for name, described in options_of(kind).items():
        object.__setattr__(instance, name, described.check(name, getattr(instance, name)))


def int_range(low: int, high: int | None = None) -> Rule:
    """Ints from `low` to `high`, both included."""
    return Rule(lambda name, value: check_int(name, value, low, high), allowed_range(low, high))


def float_range(low: float, high: float = math.inf, above: bool = False) -> Rule:
    """Finite numbers from `low` to `high`; `above` excludes `low` itself."""
    return Rule(
        lambda name, value: check_float(name, value, low, high, above),
        allowed_range(low, high, above),
    )


def one_of(*choices: str) -> Rule:
    """One of these texts."""
    return Rule(
        lambda name, value: check_choice(name, value, choices), allowed_choices(choices), choices
    )


TRUE_OR_FALSE = Rule(check_bool, "True or False")
