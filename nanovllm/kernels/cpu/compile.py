"""Compile C++ on the machine that runs it: once, into the user's cache.

If no compiler works, `load` raises and says why; the engine then uses other kernels. The libraries
have no OpenMP runtime of their own. They use the one that PyTorch has loaded, or the threads of
pool.h.

A library's code runs with the user's rights, so the cache is used only if no other user can write
there (root can do so anyway): its folder and each library belong to this user or to root, and
neither the group nor others may write to them. So no other can replace a library between the check
and the load. The folders above are those in which the user also keeps programs and settings; they
are not checked.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import torch  # noqa: F401  (it loads the OpenMP runtime)

from nanovllm.kernels.cpu.processor import description

logger = logging.getLogger("nanovllm")

COMPILERS = ("c++", "g++")  # or $CXX alone, if it is set
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
X86_FLAGS = ("-mprefer-vector-width=512",)  # ignored by processors without such vectors
# A compiler takes ten seconds of a core, and much longer on a busy machine. It has no limit: after
# this time, a warning says that it still runs. No other process waits for it.
LONG_SECONDS = 60
OLD_SECONDS = 24 * 3600  # the age at which a killed process's folder is removed
WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by other users
ELF_HEADER = struct.Struct("<4s 36x Q 10x H H 2x")  # section headers: offset, size, number


@functools.cache  # a failure is not cached
def load(source: Path, definitions: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library of a source file: from the cache, or compiled in some seconds.

    The source may include the headers of its folder; `definitions` are the compiler's -D options.
    A RuntimeError says why there is no library. Any number of processes may call this at once.
    """
    flags = FLAGS + (X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()) + definitions
    name = f"{source.stem}-{_fingerprint(source, flags)}.so"
    kept = _usable(cache_dir())
    if kept is not None:
        with contextlib.suppress(OSError):  # not compiled yet
            if _is_trusted(kept / name, (kept / name).lstat()) and _is_complete(kept / name):
                return ctypes.CDLL(str(kept / name))
    start = time.perf_counter()
    with _scratch(kept) as folder:
        built = Path(folder) / name
        library = _compile(source, built, flags)
        if kept is not None and built.parent.parent == kept:
            built.chmod(0o755)
            built.replace(kept / name)  # atomic: other processes see the whole file or none
    logger.info("compiled %s in %.1f s", source.name, time.perf_counter() - start)
    return library


def _fingerprint(source: Path, flags: tuple[str, ...]) -> str:
    """A hash of everything that determines the library: sources, compiler and processor."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    texts = [(file.name, file.read_text(encoding="utf-8")) for file in files]
    made_of = [*texts, *flags, os.environ.get("CXX", ""), description()]
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


def cache_dir() -> Path | None:
    """The folder of compiled libraries: $XDG_CACHE_HOME/nanovllm or ~/.cache/nanovllm."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if Path(folder).is_absolute():  # the XDG specification ignores relative ones
        return Path(folder) / "nanovllm"
    try:
        return Path.home() / ".cache" / "nanovllm"
    except RuntimeError:
        return None


def _usable(kept: Path | None) -> Path | None:
    """The cache's folder, made for this user alone; None if it cannot be used, which is logged."""
    if kept is None:
        return None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.mkdir(mode=0o700, exist_ok=True)
        found = kept.stat()
        if found.st_uid == os.geteuid() and found.st_mode & WRITABLE:  # made with a umask of 002
            kept.chmod(0o700)
        return kept if _is_trusted(kept, kept.stat()) else None
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
        return None


def _is_trusted(path: Path, found: os.stat_result) -> bool:
    """Whether a folder or file is ours or root's, and no other user can write it; else warn."""
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        why = "it is no ordinary file"
    elif found.st_uid not in (os.geteuid(), 0):
        why = f"it belongs to user {found.st_uid}"
    elif found.st_mode & WRITABLE:
        why = "other users may write to it"
    else:
        return True
    _warn_of_unused(path, why)
    return False


@functools.cache  # once for all libraries
def _warn_of_unused(path: Path, why: str) -> None:
    logger.warning("kernels are compiled again, because %s is not used: %s", path, why)


def _is_complete(library: Path) -> bool:
    """Whether the file has its section headers, which come last: it is not cut off."""
    data = library.read_bytes()
    if len(data) < ELF_HEADER.size:
        return False
    magic, start, size, number = ELF_HEADER.unpack_from(data)
    return bool(magic == b"\x7fELF") and start + size * number <= len(data)


def _scratch(kept: Path | None) -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for this process only, in the cache if that is writable.

    Removes the folders of processes that were killed.
    """
    if kept is not None:
        try:
            for folder in kept.glob("tmp*"):
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    if time.time() - folder.stat().st_mtime > OLD_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)
            return tempfile.TemporaryDirectory(prefix="tmp", dir=kept)
        except OSError as error:
            logger.info("compiled kernels are not kept: %s", error)
    return tempfile.TemporaryDirectory()


def _compile(source: Path, built: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile with the first compiler that makes a library that can be loaded."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise RuntimeError(f"CXX={os.environ['CXX']!r}: {error}") from None
    reasons = []
    for compiler in [chosen] if chosen else [[name] for name in COMPILERS]:
        # Linked without -fopenmp, which would add the compiler's own runtime.
        unlinked = str(built.with_suffix(".o"))
        try:
            _run([*compiler, *flags, "-c", str(source), "-o", unlinked])
            _run([*compiler, "-shared", "-pthread", unlinked, "-o", str(built)])
            return ctypes.CDLL(str(built))
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or [f"status {error.returncode}"]
            reasons.append(f"{shlex.join(compiler)}: {lines[0]}")
        except OSError as error:
            reasons.append(f"{shlex.join(compiler)}: {error}")
    raise RuntimeError("no C++ compiler that works: " + "; ".join(reasons))


def _run(command: list[str]) -> None:
    """Run a compiler until it ends. An interrupt, such as Ctrl-C, ends it."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            try:
                _, errors = process.communicate(timeout=LONG_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "%s has been compiling a kernel for %d s; Ctrl-C ends the start, and"
                    " attention_backend='torch' needs no compiler", command[0], LONG_SECONDS,
                )  # fmt: skip
                _, errors = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)
