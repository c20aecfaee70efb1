"""Helpers for all of the package: checks of values, described options, bars, deferred Ctrl-C."""

from importlib import import_module


def __getattr__(name: str) -> object:
    if name in ("FlexibleArgumentParser", "random_uuid"):  # vLLM has them here
        raise import_module("nanovllm.exports").missing(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
