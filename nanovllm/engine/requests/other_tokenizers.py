"""Tokenizers that transformers should load otherwise than by the model's config."""

from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import read_json
from nanovllm.utils.resources import trim_heap

CONFIG, PLAIN_CLASS = "tokenizer_config.json", "PreTrainedTokenizerFast"


def beside_gguf(path: Path) -> Any:
    """Load the tokenizer in a directory with a GGUF file, from which it usually was made.

    `AutoTokenizer` gives the same one. It first imports the model's config, and with that PyTorch's
    compiler and Triton: a second and 150 MiB. Its import alone is 4 MiB. Parsing the file frees
    twice what the tokenizer keeps.
    """
    if is_plain(path):
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
        trim_heap()
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers raises many kinds
        return with_default_config(path, error)


def is_plain(path: Path) -> bool:
    """Whether a directory's tokenizer is in tokenizer.json as a whole, as that of a GGUF file."""
    named = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    return named.get("tokenizer_class") == PLAIN_CLASS


def with_default_config(path: Path, error: Exception) -> Any:
    """Load a tokenizer where transformers fails with `error`, perhaps because of `config.json`.

    It needs only the model's type. If another field makes it fail, such as an int where it expects
    a float, the type's default config will do: `ModelConfig` has checked the file.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.for_model(read_json(path / "config.json")["model_type"])
    except Exception:  # transformers raises many kinds
        raise error from None
    return AutoTokenizer.from_pretrained(str(path), config=config)
