"""Give the errors of the loader the names that files have for a model's tensors."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names, checkpoint_name, usual_name

if TYPE_CHECKING:
    from nanovllm.models.decoder import Model

NAME = re.compile(r"(?<![\w./])[\w.]+(?<!\.)")  # of a tensor, in a message


def error_of_files(
    error: ValueError,
    path: Path,
    model: "Model | None",
    files: Iterable[Mapping[str, Any]],
    targets_of: Callable[["Model"], Collection[str]],
) -> ValueError:
    """The error with the name of the checkpoint and, if a `model` is loaded, those in its files.

    `files` have the tensors by name; `targets_of` finds the usual names of those of a model.
    """
    text = str(error)
    if model is not None and (model.names.prefixes or model.names.pieces):
        names = model.names
        with contextlib.suppress(OSError, ValueError):  # of a damaged file: `error` came first
            found = [name for tensors in files for name in tensors if not names.is_skipped(name)]
            text = with_file_names(text, names, found, targets_of(model))
    return ValueError(f"{path}: {text}")


def with_file_names(
    message: str, names: Names, found: Collection[str], targets: Collection[str]
) -> str:
    """The message with the names in files of the tensors that are `found` there, or are lacking."""
    there = {usual_name(name, names, targets): name for name in found}
    if all(usual == name for usual, name in there.items()):
        return message
    own = names_of(found, names)

    def in_files(match: re.Match[str]) -> str:
        name = checkpoint_name(match[0])
        return there.get(name) or (own.theirs(name) if name in targets else match[0])

    return NAME.sub(in_files, message)


def names_of(found: Collection[str], names: Names) -> Names:
    """The family's names, without what only files other than that of the tensors `found` have."""
    first, lines = {name.partition(".")[0] for name in found}, "\n".join(found)
    prefixes = {
        theirs: ours for theirs, ours in names.prefixes.items() if theirs.partition(".")[0] in first
    }
    pieces = {
        theirs: ours for theirs, ours in names.pieces.items()
        if not re.search(rf"(?<![^.\n]){re.escape(ours)}(?![^.\n])", lines)
    }  # fmt: skip
    return replace(names, prefixes=prefixes, pieces=pieces)
