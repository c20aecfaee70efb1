"""GGUFModel: a model in one GGUF file, or in the parts that `gguf-split` makes of it."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.models.gguf.file import GGUFFile, TensorInfo
from nanovllm.models.gguf.reader import damaged

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)  # counted from 1
NUMBER, TOTAL = "split.no", "split.count"  # the metadata's keys; the number counts from 0
NUM_TENSORS = "split.tensors.count"  # of all parts


def part_paths(path: Path) -> list[Path]:
    """The files of the model that begins with `path`, by its name; a missing one is named."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, total = match[1], int(match[2]), int(match[3])
    names = [f"{stem}-{index:05}-of-{total:05}{path.suffix}" for index in range(1, total + 1)]
    if number != 1 or not names:
        raise ValueError(
            f"{path} is part {number} of a model; give the first part, {stem}-00001-of-{match[3]}"
            f"{path.suffix}"
        )
    paths = [path.with_name(name) for name in names]
    if missing := [part.name for part in paths if not part.exists()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(f"{path.parent} lacks {', '.join(missing[:5])}{more}")
    return paths


@dataclass(frozen=True)
class GGUFModel:
    """The files of a model. The first one has the metadata."""

    files: tuple[GGUFFile, ...]

    @property
    def path(self) -> Path:
        """The first file's path, for errors."""
        return self.files[0].path

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the first file."""
        return self.files[0].metadata

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of all files."""
        return {name: info for file in self.files for name, info in file.tensors.items()}

    def items(self, key: str) -> list[Any]:
        """The items of an array of the metadata; none if there is no such array."""
        return self.files[0].items(key)

    def floats(self, name: str) -> list[float] | None:
        """The values of a small tensor of float32; None if there is no such tensor."""
        holders = (file for file in self.files if name in file.tensors)
        return next((file.floats(name) for file in holders), None)


def open_gguf(path: Path) -> GGUFModel:
    """Open a model by the path of its file, or of its first part."""
    files = [GGUFFile(part) for part in part_paths(path)]
    for number, file in enumerate(files):
        place = file.metadata.get(NUMBER, 0), file.metadata.get(TOTAL, 1)
        if place != (number, len(files)) and (place[1], len(files)) != (0, 1):
            raise _misnamed(file.path, *place)
    model = GGUFModel(tuple(files))
    found = sum(len(file.tensors) for file in files)
    if len(model.tensors) != found:
        raise damaged(path, "two parts have a tensor of the same name")
    if model.metadata.get(NUM_TENSORS, found) != found:
        raise damaged(path, f"{NUM_TENSORS} is {model.metadata[NUM_TENSORS]}, found {found}")
    return model


def _misnamed(path: Path, number: Any, total: Any) -> ValueError:
    """The error for a part with another number than its name says."""
    first = number + 1 if isinstance(number, int) else number
    return ValueError(
        f"{path} is part {first} of {total} by its metadata; its name must end with"
        f" -{first:05}-of-{total:05}.gguf, and the first part opens the model"
        if isinstance(first, int) and isinstance(total, int)
        else f"{path} has {NUMBER}={number!r} and {TOTAL}={total!r}"
    )
