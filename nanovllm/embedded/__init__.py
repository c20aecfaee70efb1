"""A trained two-megabyte Qwen3 model that adds numbers, shipped with the package.

With it, everything from a checkpoint directory to generated text runs and is tested without a
download: after a prompt like ``12+34=`` the greedy continuation is ``46`` and the end-of-text
token. It can only add two integers between 0 and 999; any other prompt is accepted and gets a
meaningless answer. Importing this module reads no file and loads no heavy library.
``tools/train_embedded_model.py`` makes the files. An EAGLE-3 head for it, by which speculation is
tested, is made by ``tools/train_embedded_head.py``.
"""

from pathlib import Path

EMBEDDED_MODEL: str = str(Path(__file__).resolve().parent)
"""Absolute path of the directory that holds the model and its tokenizer."""

EMBEDDED_HEAD: str = str(Path(EMBEDDED_MODEL) / "head")
"""Absolute path of the directory that holds an EAGLE-3 head for the model."""
