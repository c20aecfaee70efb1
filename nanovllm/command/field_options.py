"""Command-line options made from the fields of a dataclass, such as `Config`.

Names, types, defaults and help texts are those of the fields. An option that is not given is not in
the namespace, so the class supplies its default; the class also checks all values.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from nanovllm.option_names import option_name
from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import parse_json
from nanovllm.utils.option import NOTHING, Option, options_of

# JSON as a shell takes it, for each option that is a dict.
EXAMPLES = {
    "speculative_config": """--speculative-config '{"method": "ngram"}'""",
    "structured_outputs": """--structured-outputs '{"choice": ["yes", "no"]}'""",
}


def token_ids(text: str) -> list[int]:
    """Parse `1,2,3`."""
    return [int(part) for part in text.split(",")]


def biases(text: str) -> dict[int, float]:
    """Parse `1=-100,2=5.5`."""
    found: dict[int, float] = {}
    for part in text.split(","):
        token, bias = part.split("=")
        if int(token) in found:
            raise argparse.ArgumentTypeError(f"token {int(token)} occurs twice in {text!r}")
        found[int(token)] = float(bias)
    return found


def json_reader(example: str) -> Callable[[str], Any]:
    """Make a parser of JSON; its error for other text shows an example."""

    def read(text: str) -> Any:
        try:
            return parse_json(text)
        except ValueError as error:
            message = f"cannot read {shorten(text)} as JSON: {error}; an example is {example}"
            raise argparse.ArgumentTypeError(message) from None

    return read


# For each field type: how an option's text is parsed, and the placeholder for it in the help.
READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Iterable[int]: (token_ids, "ID,..."),
    Iterable[str]: (str, "TEXT"),
    Mapping[int, float]: (biases, "ID=BIAS,..."),
}


class AppendPairs(argparse.Action):
    """Appends a text like NAME=VALUE; `flags_for_pairs` lets several follow the flag."""

    def __call__(
        self,
        _: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        __: str | None = None,
    ) -> None:
        """Append the text."""
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), values])


def flags_for_pairs(args: Iterable[str], flags: Collection[str]) -> list[str]:
    """The arguments, with the flag repeated before each further text like NAME=VALUE.

    Any other text, such as a model's name, ends the list.
    """
    full: list[str] = []
    flag, is_first = "", False
    for arg in args:
        if arg.startswith("-"):
            name, has_value, _ = arg.partition("=")
            flag, is_first = (name, not has_value) if name in flags else ("", False)
        elif flag and not is_first and "=" in arg:
            arg = f"{flag}={arg}"
        else:
            flag, is_first = (flag, False) if is_first else ("", False)
        full.append(arg)
    return full


def option_flag(kind: type, name: str) -> str:
    """A field's flag on the command line."""
    return "--" + option_name(kind, name).replace("_", "-")


def add_field_options(
    group: argparse._ArgumentGroup,
    kind: type,
    defaults: Mapping[str, Any],
    names: Iterable[str] | None = None,
) -> None:
    """Add an option for each field of a dataclass, or for those with these `names`.

    `defaults` replace the fields' in the help.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for field in (fields[name] for name in names or fields):
        described, default = options_of(kind)[field.name], defaults.get(field.name, field.default)
        if described.only_python:
            continue
        added = group.add_argument(
            option_flag(kind, field.name),
            dest=option_name(kind, field.name),
            default=argparse.SUPPRESS,
            **_parsing(field.name, field.type, described),
        )
        # Set afterwards: some Python versions append a default of their own to a text given before.
        shown = _shown(field.type, described, default)
        added.help = f"{_help(field.type, described)} (default: {shown})"


def given_options(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of a dataclass that the command line sets."""
    names = {name: option_name(kind, name) for name in options_of(kind)}
    return {name: getattr(args, given) for name, given in names.items() if given in args}


def _parsing(name: str, annotation: Any, described: Option) -> dict[str, Any]:
    """What argparse needs to parse an option of this type."""
    kind = _main_type(annotation)
    if kind is bool:
        return dict(action=argparse.BooleanOptionalAction)
    if name in EXAMPLES:
        return dict(type=json_reader(EXAMPLES[name]), metavar="JSON")
    read, metavar = READERS[kind]
    if described.rule.choices:
        metavar = "{" + ",".join(described.rule.choices) + "}"
    more: dict[str, Any] = {}
    if described.rule.pairs:
        more, metavar = dict(action=AppendPairs), "NAME=PATH"
    elif kind == Iterable[str]:
        more = dict(action="append")
    return dict(type=_reader(read, _takes_none(annotation), metavar), metavar=metavar, **more)


def _help(annotation: Any, described: Option) -> str:
    kind, parts = _main_type(annotation), [described.help.replace("`", "")]
    if kind in (int, float):
        parts.append(f"{READERS[kind][1]} {described.rule.allowed}")
    if kind == Iterable[str]:
        several = "several may follow the flag, and it " if described.rule.pairs else ""
        parts.append(f"{several}may be given several times")
    if _takes_none(annotation) and described.none != NOTHING:
        parts.append(f"none: {described.none}".replace("`", ""))
    return "; ".join(parts)


def _shown(annotation: Any, described: Option, default: Any) -> Any:
    """A default as the help shows it; for None, what None means."""
    if default is None:
        return "none" if _takes_none(annotation) else described.none
    if isinstance(default, bool):
        return "yes" if default else "no"
    return default


def _main_type(annotation: Any) -> Any:
    """The most general type other than None: for a text or a list of texts, the list."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    return [part for part in typing.get_args(annotation) if part is not types.NoneType][-1]


def _takes_none(annotation: Any) -> bool:
    """Whether `none` is read as None: only for numbers, because it could be a text itself."""
    return types.NoneType in typing.get_args(annotation) and _main_type(annotation) in (int, float)


def _reader(read: Callable[[str], Any], none_fits: bool, metavar: str) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        if none_fits and text == "none":
            return None
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"cannot read {text!r} as {metavar}") from None

    return value
