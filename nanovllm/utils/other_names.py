"""Names of options that are not fields: another library's, or of missing options."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import did_you_mean, shorten


@dataclass(frozen=True)
class Values:
    """Values that a rule describes: those that `fit`, such as the `example`."""

    text: str
    fit: Callable[[Any], bool]
    example: Any


@dataclass(frozen=True)
class OtherName:
    """A name that is not a field: another name of the field `ours`, or a missing option.

    `accepts` are the values, or `Values`, that ask for the behaviour without the option. `why`
    describes this behaviour, or says what to use instead; it ends the error for any other value.
    """

    accepts: tuple[Any, ...] = ()
    why: str = ""
    ours: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError unless `value` is accepted."""
        if not self.takes(value):
            raise ValueError(f"{name}={shorten(value)}: {self.why.replace('`', '')}")

    def takes(self, value: Any) -> bool:
        """Whether `value` is accepted: 1 is not True, and 1 is not 1.0."""
        return any(
            one.fit(value) if isinstance(one, Values) else type(value) is type(one) and value == one
            for one in self.accepts
        )


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
            other.check(name, value)
        elif field in own or (other is not None and field in given):
            raise TypeError(f"{name} is another name of {field}; give one of them")
        else:
            own[field] = value
    return own
