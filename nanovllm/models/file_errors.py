"""Errors about a checkpoint's files: what is there instead of a file, what files do not have."""

import re
import stat
from collections.abc import Iterable
from pathlib import Path

OF_QUANTIZED = re.compile(r".*(scales?|scale_inv|qweight|qzeros|g_idx|_packed|_shape|zero_point)")
ANY_CASE = "*.[gG][gG][uU][fF]"  # GGUF files, whose ends may have capital letters
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
            whole = sorted(path.parent.glob(ANY_CASE))
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
