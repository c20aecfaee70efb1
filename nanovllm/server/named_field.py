"""The field that an error about a body names: the `param` of errors in OpenAI's form.

An error begins with the name of its field, as all checks write it.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

PLACE = r"[A-Za-z_]\w*(?:\[\d+\]|\.\w+)*"
UNKNOWN = re.compile(rf"(?:({PLACE}): )?unknown (?:field|keyword) ['\"]([\w.-]+)['\"]")
REFUSED = re.compile(rf"({PLACE}) is not supported: ")  # a field of another API
NAMED = re.compile(rf"(?:give one of )?({PLACE})(?=[\s,:=(]|$)")


class Fields(NamedTuple):
    """The names of the fields that a body may have, and the one that its prompt is made of."""

    names: Collection[str] = ()
    prompt: str = "prompt"


NO_FIELDS = Fields()


def named_field(message: str, fields: Fields) -> str | None:
    """The field of a body that the message begins with, such as `tools[0].type`."""
    if (unknown := UNKNOWN.match(message)) is not None:
        return ".".join(filter(None, unknown.groups()))
    if (refused := REFUSED.match(message)) is not None:
        return refused[1]
    if (named := NAMED.match(message)) is None:
        return None
    if message.startswith("prompt must"):
        return fields.prompt
    root = re.split(r"[.\[]", named[1])[0]
    return named[1] if root in fields.names else None
