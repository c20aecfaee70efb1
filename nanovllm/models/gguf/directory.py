"""Makes a checkpoint's directory of a GGUF file, once: the rest of the package reads that.

It has config.json, generation_config.json, the tokenizer's files, and links to the file's parts. It
is kept in the user's cache, in a folder whose name depends on the paths, sizes and times of the
parts, so that a changed file gets a new one. Of a directory that exists only the links are looked
at. Any number of processes may make one at once: each builds its own and renames it.

A file has a second directory for its dequantized weights. Its config.json has DEQUANTIZED in place
of `quantization_config`: matrices in blocks are then read as plain ones.
"""

import contextlib
import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from nanovllm.formats.names import FIELD
from nanovllm.formats.scheme import DEQUANTIZE, DEQUANTIZED, ONLINE
from nanovllm.models.cache_folder import writable_folder
from nanovllm.models.file_errors import file_error
from nanovllm.models.gguf.split import GGUFModel, open_gguf, part_paths

logger = logging.getLogger("nanovllm")

NEED_PLAIN = (DEQUANTIZE, *ONLINE)  # values of the option `quantization`
VERSION = 4  # of what is written: a directory of another version is not used
# The names of sampling parameters in files, and in generation_config.json.
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def directory_with(path: Path, quantization: str) -> Path:
    """The directory for the same weights, plain if the option `quantization` needs them plain.

    `path` is a model's directory with a file of this format, which is not read if there are others.
    """
    file = min(path.glob("*.gguf"))
    if quantization not in NEED_PLAIN or any(path.glob("*.safetensors")):
        return path
    if quantization != DEQUANTIZE:
        if not has_blocks(path):
            return path
        logger.warning(
            "%s has weights that were rounded when it was made; quantization=%r dequantizes them,"
            " and rounds them once more", file, quantization,
        )  # fmt: skip
    return gguf_directory(file, is_plain=True)


def refuse_gguf(path: Path) -> None:
    """Raise if a model's weights are those of a GGUF file."""
    if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        raise ValueError("load_format must be 'auto' for a GGUF file, got 'safetensors'")


def has_blocks(path: Path) -> bool:
    """Whether the config in a directory lists matrices in blocks. A damaged one is found later."""
    with contextlib.suppress(OSError, ValueError):
        return FIELD in json.loads((path / "config.json").read_text(encoding="utf-8"))
    return False


def gguf_directory(file: Path, option: str = "model", is_plain: bool = False) -> Path:
    """The directory for a GGUF file, or for the first part of a split one.

    With `is_plain`, its weights are read dequantized. For another kind of file it is a
    NotADirectoryError that names the `option`.
    """
    if file.suffix.lower() != ".gguf":
        raise NotADirectoryError(
            f"{option} must be a directory, or a .gguf file, but {str(file)!r} is none"
        )
    parts = part_paths(file)
    for part in parts:
        if not part.is_file():
            raise file_error(part)
    name = f"{file.stem[:80]}-{_fingerprint(parts)}{'-plain' if is_plain else ''}"
    folder = writable_folder("gguf")
    made = folder / name
    if _is_complete(made, parts):
        return made
    with tempfile.TemporaryDirectory(prefix="tmp", dir=folder) as scratch:
        built, replaced = Path(scratch) / name, Path(scratch) / "replaced"
        built.mkdir()
        _fill(built, file, parts, is_plain)
        if not _is_complete(made, parts):  # no other process was faster
            with contextlib.suppress(FileNotFoundError):
                made.rename(replaced)
            with contextlib.suppress(OSError):
                built.rename(made)
    if not _is_complete(made, parts):
        raise OSError(f"{made} cannot be made of {file}: the file or the folder was changed")
    return made


def _fingerprint(parts: list[Path]) -> str:
    """A hash of what tells apart the files that directories are made of."""
    found = [(str(part.resolve()), part.stat()) for part in parts]
    made_of = [(VERSION, name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


def _is_complete(made: Path, parts: list[Path]) -> bool:
    """Whether a directory has its files, and links to these parts."""
    links = (made / _link_name(part) for part in parts)
    return (made / "config.json").is_file() and all(
        link.exists() and link.samefile(part) for link, part in zip(links, parts, strict=True)
    )


def _fill(built: Path, file: Path, parts: list[Path], is_plain: bool) -> None:
    """Write the files of a directory."""
    model = open_gguf(file)
    try:
        texts = _texts(model, is_plain)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    for name, text in texts.items():
        (built / name).write_text(text, encoding="utf-8")
    for part in parts:
        (built / _link_name(part)).symlink_to(part.resolve())


def _link_name(part: Path) -> str:
    """The name of the link to a part, which others find by its end: in small letters."""
    return part.with_suffix(".gguf").name


def _texts(model: GGUFModel, is_plain: bool) -> dict[str, str]:
    """The contents of the directory's files by their names."""
    from nanovllm.models.gguf.fields import config_fields
    from nanovllm.models.gguf.metadata import Metadata
    from nanovllm.models.gguf.tokenizer import tokenizer_files

    config = config_fields(Metadata(model))
    if is_plain:
        config.pop(FIELD, None)
        config[DEQUANTIZED] = True
    generation = _generation_fields(model, config)
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        **tokenizer_files(model),
    }


def _generation_fields(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    """The ids that end an answer, and the sampling parameters that the file recommends."""
    from nanovllm.models.gguf.vocabulary import Vocabulary

    vocab_size: int = config["vocab_size"]
    ends = [i for i in Vocabulary(model).end_ids if i < vocab_size]
    fields = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends or None}
    given = {
        ours: model.metadata.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()
    }
    return fields | {name: value for name, value in given.items() if value is not None}
