"""Errors about a checkpoint's files: what is there instead of a file, what files do not have."""

import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.formats.names import Names, checkpoint_name, usual_name

if TYPE_CHECKING:
    from nanovllm.models.decoder import Model

OF_QUANTIZED = re.compile(r".*(scales?|scale_inv|qweight|qzeros|g_idx|_packed|_shape|zero_point)")
NAME = re.compile(r"(?<![\w./])[\w.]+(?<!\.)")  # of a tensor, in a message
KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def file_error(path: Path) -> OSError:
    """The error for a path that is no ordinary file, or is one that is too large for its kind."""
    try:
        found = path.stat()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        if path.is_symlink():
            why = ", which does not exist" if is_missing else f": {error.strerror}"
            link = f"is a link to {str(path.readlink())!r}{why}"
            return OSError(f"{path} {link}; copy or download the file again")
        if is_missing:
            whole = sorted(path.parent.glob("*.gguf"))
            hint = f", or give the file {whole[0].name} in it" if whole else ""
            return FileNotFoundError(f"{path} does not exist; its directory must have it{hint}")
        return OSError(f"{path}: {error.strerror}")
    if stat.S_ISREG(found.st_mode):
        return OSError(f"{path} has {found.st_size:,} bytes, too many for a {path.suffix} file")
    kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
    return OSError(f"{path} must be an ordinary file, but it is {kind}")


def missing_tensors(missing: Iterable[str]) -> ValueError:
    """The error for tensors that the files lack."""
    names = [*dict.fromkeys(missing)]
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ValueError(f"the files lack {', '.join(names[:5])}{rest}")


def unexpected_tensor(name: str, start: str = "unexpected tensor") -> ValueError:
    """The error for a tensor that no layer needs, with a hint if it belongs to quantized weights.

    The message begins with `start`.
    """
    hint = ""
    if OF_QUANTIZED.fullmatch(name):
        hint = " of quantized weights, which quantization_config in config.json must describe"
    return ValueError(f"{start} {name!r}{hint}")


def with_file_names(message: str, path: Path, model: "Model | None") -> str:
    """The message with the names in the files at `path` of the tensors of `model`.

    Reads the names of all tensors.
    """
    if model is None or not (model.names.prefixes or model.names.pieces):
        return message
    from nanovllm.models.loader import checkpoint_targets, read_weights

    names, targets = model.names, checkpoint_targets(model)
    found = [n for tensors in read_weights(path) for n in tensors if not names.is_skipped(n)]
    there = {usual_name(name, names, targets): name for name in found}
    if all(usual == name for usual, name in there.items()):
        return message
    own = names_of(found, names)

    def in_files(match: re.Match[str]) -> str:
        name = checkpoint_name(match[0])
        return there.get(name) or (own.theirs(name) if name in targets else match[0])

    return NAME.sub(in_files, message)


def names_of(found: Collection[str], names: Names) -> Names:
    """The family's names, without what only files other than that of the tensors `found` have."""
    first, lines = {name.partition(".")[0] for name in found}, "\n".join(found)
    prefixes = {
        theirs: ours for theirs, ours in names.prefixes.items() if theirs.partition(".")[0] in first
    }
    pieces = {
        theirs: ours for theirs, ours in names.pieces.items()
        if not re.search(rf"(?<![^.\n]){re.escape(ours)}(?![^.\n])", lines)
    }  # fmt: skip
    return replace(names, prefixes=prefixes, pieces=pieces)
