"""Other spellings of fields in a `config.json`. Plain data."""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from nanovllm.utils.checks import shorten

ConfigT = TypeVar("ConfigT")
Read = Callable[[Mapping[str, Any]], ConfigT]


def respelt(
    file: Mapping[str, Any], names: Mapping[str, str], both: bool = False
) -> dict[str, Any]:
    """The fields by our names, which `names` maps theirs to.

    The family does not read our spelling, unless it reads `both`; then values that differ are a
    ValueError.
    """
    ours = set(names.values())
    fields = {name: value for name, value in file.items() if both or name not in ours}
    for theirs, name in names.items():
        if theirs not in file:
            continue
        if fields.setdefault(name, file[theirs]) != file[theirs]:
            values = f"{theirs}={shorten(file[theirs])} and {name}={shorten(fields[name])}"
            raise ValueError(f"{values} differ; keep one of them")
    return fields


def partly_rotated(file: Mapping[str, Any], part: float) -> dict[str, Any]:
    """The fields, with the part of each head that is rotated if no field says it."""
    nested = (file.get(name) for name in ("rope_scaling", "rope_parameters"))
    says = any(isinstance(each, dict) and "partial_rotary_factor" in each for each in nested)
    given = file.get("partial_rotary_factor")
    return {**file, "partial_rotary_factor": part} if given is None and not says else {**file}


def errors_spell(names: Mapping[str, str]) -> Callable[[Read[ConfigT]], Read[ConfigT]]:
    """Let errors of a family's `read` name fields as the file does, by the names of `respelt`."""

    def wrap(read: Read[ConfigT]) -> Read[ConfigT]:
        @wraps(read)
        def read_file(file: Mapping[str, Any]) -> ConfigT:
            try:
                return read(file)
            except (TypeError, ValueError) as error:
                text = str(error)
                for theirs, ours in names.items():
                    if theirs in file and not re.search(rf"\b{theirs}\b", text):
                        text = re.sub(rf"\b{ours}\b", theirs, text)
                raise type(error)(text) from None

        return read_file

    return wrap
