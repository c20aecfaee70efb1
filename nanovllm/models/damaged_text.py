"""Finds the damaged file of a tokenizer, after libraries have failed with errors that name none."""

from pathlib import Path

from nanovllm.models.checkpoint import ordinary_file, read_json

OBJECTS = (
    "config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
TEXTS = ("merges.txt", "vocab.txt", "chat_template.jinja")


def damaged_file(path: Path) -> OSError | None:
    """The error of the first damaged file in a tokenizer's directory; None if there is none."""
    for name in (*OBJECTS, *TEXTS):
        try:
            if name in OBJECTS and (path / name).exists():
                found = read_json(path / name)
                if name == "tokenizer.json" and "error" in found:  # of a GGUF file
                    return OSError(found["error"])
            elif (path / name).exists():
                ordinary_file(path / name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return OSError(f"{path / name} is no text ({error}); copy or download it again")
        except OSError as error:
            return error
    return None
