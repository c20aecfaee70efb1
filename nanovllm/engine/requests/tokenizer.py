"""Loading a tokenizer: the one of the model directory, or another."""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HUB_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def load_tokenizer(tokenizer: str | None, model_path: Path, warns: bool = True) -> Any:
    """Load `tokenizer`, by default the model's own; None, and a warning, if the model has none.

    Without a tokenizer, prompts are token ids and outputs have no text.
    """
    if tokenizer is None and not any((model_path / name).exists() for name in TOKENIZER_FILES):
        if warns:
            logger.warning(
                "%s has no tokenizer: prompts are token ids, outputs have no text; tokenizer=..."
                " names another directory or hub id to load one from", model_path,
            )  # fmt: skip
        return None
    from transformers import AutoTokenizer

    source = str(model_path) if tokenizer is None else tokenizer
    try:
        return AutoTokenizer.from_pretrained(_directory(source))
    except Exception as error:  # transformers raises many kinds
        raise OSError(f"cannot load the tokenizer of {source!r}: {error}") from error


def _directory(source: str) -> str:
    """A local directory, or a download of all files: transformers takes seconds for each file."""
    path = Path(source).expanduser()
    if path.exists():
        return str(path)
    if source.startswith(("/", ".", "~")):
        raise FileNotFoundError("the directory does not exist")
    from huggingface_hub import snapshot_download

    return snapshot_download(source, allow_patterns=[*HUB_FILES])
