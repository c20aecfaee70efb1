"""The tokenizer of a model directory, if it has one."""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(tokenizer: str | None, model_path: Path) -> Any:
    """Load `tokenizer`, or the model's own; None where the model came without one.

    Without a tokenizer prompts are token ids, and outputs have no text.
    """
    if tokenizer is None and not any((model_path / name).exists() for name in TOKENIZER_FILES):
        logger.warning(
            "%s has no tokenizer: prompts are token ids, outputs have no text", model_path
        )
        return None
    from transformers import AutoTokenizer

    source = str(model_path) if tokenizer is None else str(Path(tokenizer).expanduser())
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises whatever its readers raise
        raise OSError(f"cannot load the tokenizer of {source!r}: {error}") from error
