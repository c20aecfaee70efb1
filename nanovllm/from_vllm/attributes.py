"""Attributes of vLLM's `LLM`, which ours gets when they are asked for, and hints for others."""

import functools
from typing import Any

from nanovllm.from_vllm.collective_rpc import collective_rpc
from nanovllm.from_vllm.llm_engine import LLMEngine
from nanovllm.from_vllm.names.python import OF_LLM
from nanovllm.utils.checks import did_you_mean


def attribute_of(llm: Any, name: str) -> Any:
    """The attribute `name` of an `LLM` whose class does not have it; raises if nothing has it."""
    if name == "llm_engine":
        return LLMEngine(llm)
    if name == "collective_rpc":
        return functools.partial(collective_rpc, llm)
    if name == "shutdown":
        return llm.close
    why = OF_LLM.get(name)
    hint = "" if name.startswith("_") else did_you_mean(name, dir(type(llm)))
    raise AttributeError(f"LLM has no attribute {name!r}{hint if why is None else f': {why}'}")
