"""Checkpoints that `nanovllm quantize` makes of a plain one, with a text of Python's source."""

import os
from pathlib import Path
from typing import Any

from nanovllm.quantize.checkpoint import quantize_checkpoint
from nanovllm.quantize.options import QuantizeOptions

SAVED: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq-64": dict(group_size=64),
    "gptq-128": dict(group_size=128),
    "rtn": dict(method="rtn"),
    "saved-int8": dict(format="int8"),
}
NUM_SAMPLES, MAX_LENGTH = 64, 256
# The pages whose errors are measured are not in these files.
FILES = (
    "statistics.py", "argparse.py", "asyncio/tasks.py", "difflib.py", "ipaddress.py",
    "logging/__init__.py", "pathlib.py", "textwrap.py", "typing.py", "doctest.py", "pdb.py",
    "enum.py", "random.py", "datetime.py", "collections/__init__.py", "heapq.py",
)  # fmt: skip


def saved_checkpoint(plain: Path, name: str, folder: Path) -> Path:
    """A directory with the checkpoint, quantized as SAVED says."""
    path, chosen = folder / "saved", SAVED[name]
    options = QuantizeOptions(
        model=str(plain), out=str(path), device="cpu", num_samples=NUM_SAMPLES,
        max_length=MAX_LENGTH, text=[] if "method" in chosen or "format" in chosen else text(),
        **chosen,
    )  # fmt: skip
    quantize_checkpoint(options)
    return path


def text() -> list[str]:
    """Files of Python's standard library."""
    library = Path(os.__file__).parent
    return [str(library / name) for name in FILES]
