"""Names of options that are not fields: another library's, or of missing options."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import did_you_mean, shorten

NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Values:
    """Values that a rule describes: those that `fit`, such as the `example`.

    If the field `same_as` is given too, its value is the only one.
    """

    text: str
    fit: Callable[[Any], bool]
    example: Any
    same_as: str | None = None

    def has(self, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether the value is one of these next to the `given` fields."""
        if self.same_as is not None and self.same_as in given:
            return _is(value, given[self.same_as])
        return self.fit(value)


@dataclass(frozen=True)
class OtherName:
    """A name that is not a field: another name of the field `ours`, or a missing option.

    `accepts` are the values, or `Values`, that ask for the behaviour without the option. `why`
    describes this behaviour, or says what to use instead; it ends the error for any other value.
    """

    accepts: tuple[Any, ...] = ()
    why: str = ""
    ours: str | None = None

    def check(self, name: str, value: Any, given: Mapping[str, Any] = NO_FIELDS) -> None:
        """Raise a ValueError unless `value` is accepted next to the `given` fields."""
        if not self.takes(value, given):
            raise ValueError(f"{name}={shorten(value)}: {self.why.replace('`', '')}")

    def takes(self, value: Any, given: Mapping[str, Any] = NO_FIELDS) -> bool:
        """Whether `value` is accepted next to the `given` fields."""
        return any(
            one.has(value, given) if isinstance(one, Values) else _is(value, one)
            for one in self.accepts
        )


def _is(value: Any, one: Any) -> bool:
    """Whether a value is this one: 1 is not True, and 1 is not 1.0."""
    return type(value) is type(one) and bool(value == one)


def own_names(
    what: str,
    fields: Collection[str],
    other_names: Mapping[str, OtherName],
    given: dict[str, Any],
) -> dict[str, Any]:
    """The `given` values, each by the name of its field."""
    own: dict[str, Any] = {}
    for name, value in given.items():
        other = None if name in fields else other_names.get(name)
        field = name if other is None else other.ours
        if other is None and name not in fields:
            others = [other for other in other_names if abs(len(other) - len(name)) < 4]
            hint = did_you_mean(name, fields) or did_you_mean(name, others)
            raise TypeError(f"unknown {what} {name!r}{hint or '; there are ' + ', '.join(fields)}")
        if field is None:
            assert other is not None
            other.check(name, value, given)
        elif field in own or (other is not None and field in given):
            raise TypeError(f"{name} is another name of {field}; give one of them")
        else:
            own[field] = value
    return own
