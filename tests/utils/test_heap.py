"""Freed memory goes back to the system."""

import ctypes
import gc
import os
import platform
import threading
from pathlib import Path

import pytest

from nanovllm.utils import resources

SIZE, COUNT = 100 << 10, 1000  # in the heap, as smaller than what malloc maps


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def leave_holes(kept: list[ctypes.Array[ctypes.c_char]]) -> None:
    """Free nearly all of some memory, but not its end."""
    blocks = [ctypes.create_string_buffer(b"x" * (SIZE - 1), SIZE) for _ in range(COUNT)]
    kept.append(blocks[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no trim")
def test_memory_that_threads_have_freed_is_returned() -> None:
    kept: list[ctypes.Array[ctypes.c_char]] = []
    leave_holes(kept)
    thread = threading.Thread(target=leave_holes, args=(kept,))
    thread.start()
    thread.join()
    before = resident()
    resources.trim_heap()
    assert before - resident() > SIZE * COUNT // 2


def test_what_lives_is_not_searched_again() -> None:
    one = [object()]
    try:
        resources.keep_what_lives()
        assert not any(each is one for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is one for each in gc.get_objects())


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_without_glibc_nothing_happens(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(_: None) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", raise_error)
    resources.trim_heap()
