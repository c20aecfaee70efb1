"""The index of a checkpoint in several files: which file has which tensor. It reads no files."""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from nanovllm.utils.checks import shorten


def files_of_tensors(index: Path, raw: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor by the fields of an index; an OSError says what is wrong with them.

    The files must be in the index's directory, or in folders of it.
    """
    named = raw.get("weight_map")
    if not isinstance(named, dict):
        raise OSError(f"{index} has no weight_map")
    for name in named.values():
        if not isinstance(name, str) or not name:
            raise OSError(
                f"{index}: weight_map must name a file for each tensor, got {shorten(name)}"
            )
        if not is_inside(name):
            raise OSError(f"{index} lists {name!r}, which is outside of its directory")
    return named


def indexed_files(index: Path, raw: Mapping[str, Any]) -> list[Path]:
    """The files that an index names; a missing one is an error that names it."""
    files = [index.parent / name for name in sorted(set(files_of_tensors(index, raw).values()))]
    if missing := [file.name for file in files if not (file.exists() or file.is_symlink())]:
        raise FileNotFoundError(
            f"{index.parent} lacks {', '.join(missing)}, listed in {index.name}"
        )
    return files


def is_inside(name: str) -> bool:
    """Whether a relative path stays in its directory. Links in the directory may lead elsewhere."""
    return not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
