"""OutputDirectory: the files of the new checkpoint, which appear when all of them are written."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm.formats.names import FIELD
from nanovllm.formats.scheme import DEQUANTIZED
from nanovllm.models.checkpoint import INDEX, TOKENIZER_PATTERNS, read_json

SHARD = 2 << 30  # bytes of a file of weights, about; they are in memory until it is written
OTHERS = (*TOKENIZER_PATTERNS, "LICENSE*", "NOTICE*")


class OutputDirectory:
    """Files of weights that are written one after the other, then the index and the other files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self.num_bytes = self._num_kept = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; writes a file if there are enough."""
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._num_kept += tensor.nbytes
        if self._num_kept >= SHARD:
            self._write()

    def _write(self) -> None:
        path = self.folder / f"{len(self._files)}.safetensors"
        save_file(self._tensors, path, {"format": "pt"})
        path.chmod(0o644)  # safetensors makes it readable by its owner alone
        self._files.append([*self._tensors])
        self.num_bytes += self._num_kept
        self._tensors, self._num_kept = {}, 0

    def finish(self, source: Path, quantization: dict[str, Any]) -> None:
        """Write the last weights, the config, and copies of the source's other files."""
        if self._tensors:
            self._write()
        weight_map: dict[str, str] = {}
        number = len(self._files)
        for index, tensors in enumerate(self._files):
            name = f"model-{index + 1:05}-of-{number:05}.safetensors"
            name = "model.safetensors" if number == 1 else name
            (self.folder / f"{index}.safetensors").rename(self.folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        if number > 1:
            metadata = {"total_size": self.num_bytes}
            self._write_json(INDEX, {"metadata": metadata, "weight_map": weight_map})
        for file in source.iterdir():
            is_old = file.name == "config.json" or file.name.endswith(".index.json")
            if not is_old and file.is_file() and any(map(file.match, OTHERS)):
                shutil.copyfile(file, self.folder / file.name)
        config = read_json(source / "config.json") | {FIELD: quantization}
        config.pop(DEQUANTIZED, None)
        self._write_json("config.json", config)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, indent=2) + "\n"
        (self.folder / name).write_text(text, encoding="utf-8")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A folder to write to, which gets the name `path` at the end.

    After an error it is removed, with the parents that were made for it.
    """
    made = [each for each in path.parents if not each.exists()]  # the innermost comes first
    with ExitStack() as undo:
        for parent in reversed(made):
            parent.mkdir(exist_ok=True)  # a path with .. may have made it
            undo.callback(_remove_empty, parent)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder
        folder.chmod(0o755)
        folder.rename(path)
        undo.pop_all()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # something else has been put there
        folder.rmdir()
