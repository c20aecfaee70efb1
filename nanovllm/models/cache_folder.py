"""The user's cache: folders for what is made of models, or downloaded, and can be made again."""

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger("nanovllm")

WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by other users


def writable_folder(kind: str) -> Path:
    """The folder of a kind of files, made for this user alone.

    It is in $NANOVLLM_CACHE, $XDG_CACHE_HOME/nanovllm or ~/.cache/nanovllm; if none of them can be
    written, in the system's folder for temporary files.
    """
    temporary = Path(tempfile.gettempdir()) / f"nanovllm-{kind}-{os.geteuid()}"
    for folder in (*kept_folders(kind), temporary):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.stat()
            if found.st_uid == os.geteuid() and not found.st_mode & WRITABLE:
                tempfile.TemporaryFile(dir=folder).close()
                return folder
            logger.warning("%s is not used: other users may write to it", folder)
        except OSError as error:
            logger.info("%s is not used: %s", folder, error)
    return Path(tempfile.mkdtemp(prefix=f"nanovllm-{kind}-"))


def kept_folders(kind: str) -> list[Path]:
    """The cache's folder of a kind of files, if the environment has a place for one."""
    if chosen := os.environ.get("NANOVLLM_CACHE", ""):
        return [Path(chosen).expanduser().absolute() / kind]
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():  # the XDG specification ignores relative ones
        return [Path(cache) / "nanovllm" / kind]
    with contextlib.suppress(RuntimeError):  # a user without a home
        return [Path.home() / ".cache" / "nanovllm" / kind]
    return []
