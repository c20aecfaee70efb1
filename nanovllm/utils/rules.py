"""Rules that the options of several classes share: names of models, and how they are quantized."""

import os
from typing import Any

from nanovllm.utils.checks import allowed_choices, check_choice, check_text, shorten
from nanovllm.utils.option import Rule

A_PATH = "a path or a hub id"
A_REVISION = "a branch, a tag or a commit"
QUANTIZATIONS = ("fp8", "int8", "int4", "compressed-tensors", "awq", "gptq")


def _check_path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"{name} must be {A_PATH}, got {shorten(value)}")
    return str(os.fspath(value))


def _check_directory(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"{name} must be {DIRECTORY.allowed}, got {shorten(value)}")
    return str(os.fspath(value))


def _check_revision(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be {A_REVISION}, got {shorten(value)}")
    return value


def _check_some_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be a text that is not empty, got {shorten(value)}")
    check_text(name, value)
    return value


def type_of(choices: tuple[str, ...], others: dict[str, str]) -> Rule:
    """One of the `choices`, or another name of one; torch.dtype objects too."""

    def check(name: str, value: Any) -> str:
        text = str(value).removeprefix("torch.")
        return check_choice(name, others.get(text, text), choices)

    return Rule(check, allowed_choices(choices), choices)


PATH = Rule(_check_path, A_PATH)
DIRECTORY = Rule(_check_directory, "the path of a directory")
REVISION = Rule(_check_revision, A_REVISION)
QUANTIZATION = type_of(QUANTIZATIONS, {"awq_marlin": "awq", "gptq_marlin": "gptq"})  # vLLM's
SOME_TEXT = Rule(_check_some_text, "a text that is not empty")
