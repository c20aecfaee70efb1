"""Loads a tokenizer: that of the model directory, or another."""

import logging
from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import TOKENIZER_PATTERNS, find_directory

logger = logging.getLogger("nanovllm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(tokenizer: str | None, model_path: Path) -> bool:
    """Whether there is a tokenizer to load: the option names one, or the model has its files."""
    return tokenizer is not None or any((model_path / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(
    tokenizer: str | None,
    model_path: Path,
    *,
    download_dir: str | None = None,
    warns: bool = True,
) -> Any:
    """Load `tokenizer`, by default the model's own; None, and a warning, if the model has none.

    Without a tokenizer, prompts are token ids and outputs have no text. `download_dir` is for a
    `tokenizer` on the hub; its main branch is used.
    """
    if not has_tokenizer(tokenizer, model_path):
        if warns:
            logger.warning(
                "%s has no tokenizer: prompts are token ids, outputs have no text; tokenizer=..."
                " names another directory or hub id to load one from", model_path,
            )  # fmt: skip
        return None
    source, path = str(model_path) if tokenizer is None else tokenizer, model_path
    try:
        if tokenizer is not None:  # all files are downloaded, as transformers is slow
            path = find_directory("tokenizer", tokenizer, TOKENIZER_PATTERNS, None, download_dir)
        return _from_directory(path)
    except Exception as error:  # transformers raises many kinds
        from nanovllm.models.damaged_text import damaged_file

        reason = damaged_file(path) or error
        raise OSError(f"cannot load the tokenizer of {source!r}: {reason}") from error


def _from_directory(path: Path) -> Any:
    """The tokenizer in a directory, even if transformers cannot parse the `config.json` there."""
    if any(path.glob("*.gguf")):
        from nanovllm.engine.requests.other_tokenizers import beside_gguf

        return beside_gguf(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers raises many kinds
        from nanovllm.engine.requests.other_tokenizers import with_default_config

        return with_default_config(path, error)
