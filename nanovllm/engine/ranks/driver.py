"""Calls CUDA's driver by ctypes, for memory that PyTorch has no public functions for."""

import ctypes
import functools
from typing import Any


@functools.cache
def driver() -> Any:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; a RuntimeError with CUDA's number if it fails."""
    if status := getattr(driver(), name)(*arguments):
        raise RuntimeError(f"{name} fails with CUDA's error {status}")
