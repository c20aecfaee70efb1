"""Loading a tokenizer: the one of the model directory, or another."""

import logging
from pathlib import Path
from typing import Any

from nanovllm.models.config import read_json
from nanovllm.models.hub import download, local_directory

logger = logging.getLogger("nanovllm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HUB_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def load_tokenizer(
    tokenizer: str | None,
    model_path: Path,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    warns: bool = True,
) -> Any:
    """Load `tokenizer`, by default the model's own; None, and a warning, if the model has none.

    Without a tokenizer, prompts are token ids and outputs have no text. `revision` and
    `download_dir` are for a `tokenizer` on the hub.
    """
    if tokenizer is None and not any((model_path / name).exists() for name in TOKENIZER_FILES):
        if warns:
            logger.warning(
                "%s has no tokenizer: prompts are token ids, outputs have no text; tokenizer=..."
                " names another directory or hub id to load one from", model_path,
            )  # fmt: skip
        return None
    directory = model_path if tokenizer is None else None
    source = tokenizer or str(model_path)
    try:
        directory = directory or _directory(source, revision=revision, download_dir=download_dir)
        return _from_directory(directory)
    except Exception as error:  # transformers raises many kinds
        if directory is None and isinstance(error, ValueError):  # a revision of a local directory
            raise
        raise OSError(f"cannot load the tokenizer of {source!r}: {error}") from error


def _directory(
    source: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """A local directory, or a download of all files: transformers takes seconds for each file."""
    path = local_directory("tokenizer", source, revision)
    return path or download("tokenizer", source, HUB_FILES, revision, download_dir)


def _from_directory(path: Path) -> Any:
    """transformers' tokenizer, whether transformers can parse the model's config or not.

    It reads `config.json` for the model's type. If it fails on another field, such as an int where
    it wants a float, it gets the type's default config: `ModelConfig` checks the file.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception:  # transformers raises many kinds
        try:
            config = AutoConfig.for_model(read_json(path / "config.json")["model_type"])
        except Exception:
            config = None
        if config is None:
            raise
        return AutoTokenizer.from_pretrained(str(path), config=config)
