"""Checkpoints of the decoder alone, as embedding models are often saved: without a head.

Their tensors' names lack the first part, and they may name the decoder's class as architecture. No
PyTorch here: weights are not read.
"""

import json
import struct
from collections.abc import Container, Iterable
from pathlib import Path

INDEX = "model.safetensors.index.json"
MAX_HEADER = 1 << 28  # bytes; safetensors allows fewer
NO_HEAD = (
    "this model has no head (lm_head), so that it generates nothing; embed and encode compute its"
    " vectors"
)


def causal_name(name: str, known: Container[str]) -> str:
    """The architecture with a head, if `name` is the decoder of a known one; else `name`."""
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return whole if name.endswith("Model") and whole in known else name


def lacks_head(path: Path) -> bool:
    """Whether the checkpoint in a directory is a decoder alone.

    The answer is no if its files cannot be read; loading them raises then.
    """
    try:
        names = [*_names(path)]
    except (OSError, TypeError, ValueError, KeyError, struct.error):
        return False
    is_bare = any(name.startswith("layers.") for name in names)
    return is_bare and not any(name.startswith("lm_head.") for name in names)


def _names(path: Path) -> Iterable[str]:
    """The names of a checkpoint's tensors."""
    if (path / INDEX).exists():
        yield from map(str, json.loads((path / INDEX).read_text("utf-8"))["weight_map"])
        return
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size <= MAX_HEADER:
                yield from json.loads(stream.read(size))
