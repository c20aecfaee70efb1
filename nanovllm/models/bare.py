"""Detect checkpoints without a head: embedding models are often saved as the decoder alone.

The names of their tensors lack the prefix "model.". No PyTorch here: weights are not read.
"""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from nanovllm.models.checkpoint import INDEX, read_json, weight_files
from nanovllm.models.index import files_of_tensors

MAX_HEADER = 1 << 28  # bytes; safetensors allows fewer


def lacks_head(path: Path) -> bool:
    """Whether the checkpoint in a directory is a decoder alone.

    False if its files cannot be read: loading them raises the error.
    """
    try:
        names = [*_names(path)]
    except (OSError, TypeError, ValueError, KeyError, RecursionError, struct.error):
        return False
    is_bare = any(name.startswith("layers.") for name in names)
    return is_bare and not any(name.startswith("lm_head.") for name in names)


def _names(path: Path) -> Iterable[str]:
    """The names of a checkpoint's tensors."""
    if (path / INDEX).exists():
        yield from files_of_tensors(path / INDEX, read_json(path / INDEX))
        return
    for file in weight_files(path):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size <= MAX_HEADER:
                yield from json.loads(stream.read(size))
