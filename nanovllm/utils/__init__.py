"""Helpers for all of the package: checks of values, described options, bars, deferred Ctrl-C."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_beside(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of the package: vLLM has other names there."""

    def find(name: str) -> Any:
        if name.startswith("__"):  # Python asks for some at each import
            raise AttributeError(name)
        return import_module("nanovllm.exports").name_beside(module, name)

    return find


__getattr__ = names_beside("utils")
