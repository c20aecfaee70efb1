"""Attributes of vLLM's `LLM`, which ours gets when they are asked for, and hints for others."""

import functools
from typing import Any

from nanovllm.from_vllm.collective_rpc import collective_rpc
from nanovllm.from_vllm.llm_engine import LLMEngine
from nanovllm.utils.checks import did_you_mean

INSTEAD = {
    "classify": "no model classifies; see LLM.score and LLM.encode",
    "reward": "no model rewards; LLM.encode has hidden states",
    "set_tokenizer": "assign to llm.tokenizer",
    "get_world_size": "it is llm.config.tensor_parallel_size",
    "preprocess_chat": "LLM.chat_prompts makes token ids of conversations",
    "wait_for_completion": "LLM.step returns the outputs of finished requests",
    "reset_mm_cache": "models are text only",
    "init_weight_transfer_engine": "LLM.update_weights takes tensors",
    "request_counter": "an engine numbers its requests",
    "engine_class": "llm.llm_engine has vLLM's methods",
    "default_sampling_params": "see LLM.get_default_sampling_params",
}


def attribute_of(llm: Any, name: str) -> Any:
    """The attribute `name` of an `LLM` whose class does not have it; raises if nothing has it."""
    if name == "llm_engine":
        return LLMEngine(llm)
    if name == "collective_rpc":
        return functools.partial(collective_rpc, llm)
    if name == "shutdown":
        return llm.close
    why = INSTEAD.get(name)
    hint = "" if name.startswith("_") else did_you_mean(name, dir(type(llm)))
    raise AttributeError(f"LLM has no attribute {name!r}{hint if why is None else f': {why}'}")
