"""Compile C++ on the machine that runs it: once, into the user's cache.

If no compiler works, `load` raises and says why; the engine then uses other kernels. The libraries
have no OpenMP runtime of their own. They use the one that PyTorch has loaded, or the threads of
pool.h.
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
# The limit for one run of a compiler. It takes ten seconds of a core; minutes on a busy machine.
MAX_SECONDS = 600
# The age at which no process compiles in its folder any more: each compiler runs at most twice.
OLD_SECONDS = 3 * len(COMPILERS) * MAX_SECONDS
ELF_HEADER = struct.Struct("<4s 36x Q 10x H H 2x")  # section headers: offset, size, number


@functools.cache  # a failure is not cached
def load(source: Path, definitions: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library of a source file: from the cache, or compiled in some seconds.

    The source may include the headers of its folder; `definitions` are the compiler's -D options.
    A RuntimeError says why there is no library. Any number of processes may call this at once.
    """
    flags = FLAGS + (X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()) + definitions
    name = f"{source.stem}-{_fingerprint(source, flags)}.so"
    kept = cache_dir()
    if kept is not None:
        with contextlib.suppress(OSError):  # not compiled yet
            if _is_complete(kept / name):
                return ctypes.CDLL(str(kept / name))
    start = time.perf_counter()
    with _scratch(kept) as folder:
        built = Path(folder) / name
        library = _compile(source, built, flags)
        if kept is not None and built.parent.parent == kept:
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
            kept.mkdir(parents=True, exist_ok=True)
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
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{shlex.join(compiler)}: {error}")
    raise RuntimeError("no C++ compiler that works: " + "; ".join(reasons))


def _run(command: list[str]) -> None:
    subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        timeout=MAX_SECONDS,
    )  # fmt: skip
