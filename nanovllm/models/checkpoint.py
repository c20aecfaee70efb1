"""A checkpoint's directory: where it is, its JSON files, and its files of weights.

No PyTorch here: weights are not read.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
CONFIG_FILES = ("config.json", "generation_config.json")
INDEX = "model.safetensors.index.json"
MAX_JSON = 1 << 28  # bytes; published tokenizers and indexes have up to 40 MB


def find_directory(
    option: str, source: str, files: Sequence[str], revision: str | None = None,
    download_dir: str | None = None,
) -> Path:  # fmt: skip
    """The directory `source`, or a download of the hub id's files that match one of `files`.

    A GGUF file has a directory that is made of it; a hub id may name one after a colon.

    `option` names the source in errors. What matches and is no ordinary file is an error: most
    files are optional, and a damaged link must not count as a missing file.
    """
    path = local_directory(option, source, revision)
    if path is None:
        from nanovllm.models.hub import download

        path = download(option, source, files, revision, download_dir)
    for file in (file for file in path.iterdir() if any(map(file.match, files))):
        ordinary_file(file)
    return path


def resolve_model(
    model: str, files: Sequence[str] = MODEL_PATTERNS, *, revision: str | None = None,
    download_dir: str | None = None, quantization: str | None = None,
) -> Path:  # fmt: skip
    """The directory of `model`: a local path, a hub id, or a name of the package index's table.

    Of a hub id, `files` are downloaded. `quantization` is the option of that name: it may ask for
    plain weights of a GGUF file, which have a directory of their own.
    """
    path = find_directory("model", model, files, revision, download_dir)
    if quantization is None or not any(path.glob("*.gguf")):
        return path
    from nanovllm.models.gguf.directory import directory_with

    return directory_with(path, quantization)


def local_directory(option: str, source: str, revision: str | None = None) -> Path | None:
    """The local directory `source`, in which `~` is the user's home; None if there is none.

    That of a GGUF file is made. `option` names the source in errors. A `revision` of a local
    directory is a ValueError.
    """
    try:
        path = Path(source).expanduser()
        is_file = (path.exists() or path.is_symlink()) and not path.is_dir()
    except (RuntimeError, ValueError) as error:  # an unknown ~user, or a NUL in the path
        raise FileNotFoundError(f"{option} directory {source!r} cannot exist: {error}") from None
    if is_file:
        from nanovllm.models.gguf.directory import gguf_directory

        path = gguf_directory(path, option)
    elif not path.is_dir():
        return None
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} is one of the hub, but {option} {source!r} is a local directory"
        )
    return path


def ordinary_file(path: Path) -> Path:
    """The path of an ordinary file, or of a link to one; for anything else an OSError says what.

    Nothing else may be opened: opening a FIFO waits for a writer.
    """
    if not path.is_file() or (path.suffix == ".json" and path.stat().st_size > MAX_JSON):
        from nanovllm.models.file_errors import file_error

        raise file_error(path)
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a broken or missing file is an OSError that names the file."""
    try:
        value = json.loads(ordinary_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is not valid JSON ({error}); copy or download it again") from None
    if not isinstance(value, dict):
        raise OSError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


@contextlib.contextmanager
def fields_of(path: Path) -> Iterator[dict[str, Any]]:
    """The fields of a file, for a block. Errors in the block get the file's name."""
    raw = read_json(path)
    try:
        yield raw
    except KeyError as error:
        raise ValueError(f"{path} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None
    except IndexError as error:
        raise ValueError(f"{path}: a list has too few items: {error}") from None


def weight_files(path: Path) -> list[Path]:
    """The files of a checkpoint's weights; one that cannot be read is an error that names it."""
    if (path / INDEX).exists():
        from nanovllm.models.index import indexed_files

        files = indexed_files(path / INDEX, read_json(path / INDEX))
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    if not files:
        hint = "; convert its .bin files to safetensors" if list(path.glob("*.bin")) else ""
        raise FileNotFoundError(f"{path} has no .safetensors file{hint}")
    return [ordinary_file(file) for file in files]
