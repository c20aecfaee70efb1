"""Options: dataclass fields that carry a help text and a rule for their values.

The check of a value, `--help` and docs/options.md are all made from this one description.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.utils.checks import (
    allowed_choices,
    allowed_range,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_text,
    shorten,
)

if TYPE_CHECKING:
    from nanovllm.utils.other_names import OtherName

T = TypeVar("T")
NOTHING = "none"  # the help for None where None sets nothing
QUANTIZATIONS = ("fp8", "int8", "int4", "dequantize", "compressed-tensors", "awq", "gptq", "gguf",
                 "mxfp4")  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Which values an option takes.

    `check(name, value)` raises, or returns the value to keep; `allowed` completes "must be ...".
    With `pairs`, a list of texts like NAME=VALUE, several texts may follow one flag.
    """

    check: Callable[[str, Any], Any]
    allowed: str
    choices: tuple[str, ...] = ()
    pairs: bool = False


@dataclass(frozen=True)
class Option:
    """A field's description. `none` says what None means; without `none`, None is refused.

    `value_of_none` makes the value that replaces None at once; without it None is kept. An option
    that is `only_python` is not on the command line, and not in bodies of requests.
    """

    help: str
    rule: Rule
    none: str | None = None
    value_of_none: Callable[[], Any] | None = None
    only_python: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return the value to keep; TypeError or ValueError if it is not allowed."""
        if value is None and self.none is not None:
            return self.value_of_none() if self.value_of_none else None
        return self.rule.check(name, value)


def by_name(
    what: str, other_names: "Callable[[], Mapping[str, OtherName]]" = dict, can_change: bool = False
) -> Callable[[type[T]], type[T]]:
    """A decorator that lets the constructor of a frozen dataclass take `other_names` too.

    `other_names` is called when a name is not a field's. An unknown name is an error that says what
    to do, and so is an assignment to a field, unless the class `can_change`: then the object is
    checked as when it is made. Errors call a field `what`.
    """

    def decorate(kind: type[T]) -> type[T]:
        decorated: Any = kind
        made, fields = decorated.__init__, options_of(decorated)

        @functools.wraps(made)
        def init(self: T, *args: Any, **given: Any) -> None:
            if not given.keys() <= fields.keys():
                from nanovllm.utils.other_names import own_names

                given = own_names(what, fields, other_names(), given)
            made(self, *args, **given)

        def change(self: T, name: str, value: object) -> None:
            from nanovllm.utils.changes import change_field

            change_field(self, name, value, fields, can_change)

        decorated.__init__, decorated.__setattr__ = init, change
        return kind

    return decorate


def option(
    default: T,
    help: str,  # noqa: A002
    rule: Rule,
    none: str | None = None,
    value_of_none: Callable[[], T] | None = None,
    only_python: bool = False,
) -> T:
    """A dataclass field with a default."""
    described = Option(help, rule, none, value_of_none, only_python)
    return dataclasses.field(default=default, metadata={"option": described})


def required(help: str, rule: Rule) -> Any:  # noqa: A002
    """A dataclass field without a default."""
    return dataclasses.field(metadata={"option": Option(help, rule)})


@functools.cache
def options_of(kind: Any) -> dict[str, Option]:
    """The options of a dataclass by name. All its fields are made by `option` or `required`."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


def check_options(instance: Any) -> None:
    """Check every field of a frozen dataclass, and keep the values that the rules return.

    Defaults are not checked: most fields have them, and a server checks many instances a second.
    """
    kind: Any = type(instance)
    for name, (described, default) in _with_defaults(kind).items():
        value = getattr(instance, name)
        if value is not default:
            object.__setattr__(instance, name, described.check(name, value))


@functools.cache
def _with_defaults(kind: Any) -> dict[str, tuple[Option, Any]]:
    """The options of a dataclass, and the default of each that needs no check."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {
        name: (described, dataclasses.MISSING if described.value_of_none else defaults[name])
        for name, described in options_of(kind).items()
    }


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


def _some(allowed: str, kinds: Any = str) -> Rule:
    """A text that is not empty, or a value of other `kinds` that is turned into one."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, kinds) or not os.fspath(value):
            raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
        if kinds is str:  # file names may have other bytes
            check_text(name, value)
        return str(os.fspath(value))

    return Rule(check, allowed)


def type_of(choices: tuple[str, ...], others: dict[str, str]) -> Rule:
    """One of the `choices`, or another name of one; torch.dtype objects too."""

    def check(name: str, value: Any) -> str:
        text = str(value).removeprefix("torch.")
        return check_choice(name, others.get(text, text), choices)

    return Rule(check, allowed_choices(choices), choices)


PATH = _some("a path or a hub id", str | os.PathLike)
DIRECTORY = _some("the path of a directory", str | os.PathLike)
REVISION = _some("a branch, a tag or a commit")
QUANTIZATION = type_of(QUANTIZATIONS, {"awq_marlin": "awq", "gptq_marlin": "gptq"})  # vLLM's
SOME_TEXT = _some("a text that is not empty")
