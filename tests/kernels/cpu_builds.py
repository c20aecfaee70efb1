"""The CPU's kernels as they are compiled for other processors."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.compile import load

# Without AVX-512 and VNNI; not optimized, so that it is compiled in a few seconds.
AVX2 = ("-mno-avx512f", "-mno-avxvnni", "-O1")


@contextlib.contextmanager
def compiled_with(*flags: str) -> Iterator[None]:
    """Compile the kernels with further flags in the block; without any, nothing is changed."""
    if not flags:
        yield
        return
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are x86's")

    def other(source: Path = library.SOURCE) -> ctypes.CDLL:
        return load(source, (*library.DEFINITIONS, *flags))

    caches = (library.function, library.constant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", other)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
