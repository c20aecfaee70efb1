"""vLLM's modules that are not here under their names: what to import instead."""

import sys

TEXT_ONLY = "models are text only"
SERVER = "`nanovllm serve` is the server: docs/serving.md"
KERNELS = "kernels are chosen by the device: docs/kernels.md"

MODULES = {
    "assets": TEXT_ONLY,
    "attention": KERNELS,
    "beam_search": "from nanovllm import BeamSearchParams, BeamSearchOutput",
    "compilation": KERNELS,
    "device_allocator": "see enable_sleep_mode",
    "distributed": "see tensor_parallel_size; nanovllm.ray runs engines on several machines",
    "engine.arg_utils": "from nanovllm import EngineArgs, AsyncEngineArgs",
    "engine.async_llm_engine": "from nanovllm import AsyncLLMEngine",
    "engine.metrics": "from nanovllm.metrics import Metric; LLM.get_metrics returns them",
    "engine.output_processor": "from nanovllm import RequestOutput",
    "engine.protocol": "from nanovllm import AsyncLLMEngine",
    "entrypoints": f"from nanovllm import LLM; {SERVER}",
    "envs": "environment variables of vLLM are not read; see docs/options.md",
    "executor": "see tensor_parallel_size",
    "inputs": "from nanovllm import TextPrompt, TokensPrompt, PromptType",
    "logger": "use logging.getLogger; NANOVLLM_LOG=debug shows the log of nanovllm",
    "logits_process": "logits_processors of SamplingParams are callables: docs/usage.md",
    "logprobs": "from nanovllm.outputs import TokenLogprob",
    "lora": "from nanovllm import LoRARequest",
    "model_executor": "from nanovllm import register_model: docs/adding_a_model.md",
    "multimodal": TEXT_ONLY,
    "parser": "see tool_parser and reasoning_parser: docs/tools.md",
    "platforms": "see `device`: docs/options.md",
    "plugins": "from nanovllm import register_model: docs/adding_a_model.md",
    "prompt_adapter": "from nanovllm import LoRARequest",
    "reasoning": "see reasoning_parser: docs/tools.md",
    "renderers": "LLM.chat_prompts makes token ids of conversations",
    "sequence": "from nanovllm import RequestOutput; from nanovllm.outputs import TokenLogprob",
    "spec_decode": "see speculative_config: docs/speculation.md",
    "tokenizers": "LLM.get_tokenizer returns the tokenizer",
    "tool_parsers": "see tool_parser: docs/tools.md",
    "transformers_utils": "LLM.get_tokenizer returns the tokenizer, one of transformers",
    "usage": "nothing is reported",
    "utils.argparse_utils": "use argparse.ArgumentParser",
    "v1": (
        "from nanovllm import LLMEngine, AsyncLLM, AsyncLLMEngine; metrics are in nanovllm.metrics"
    ),
    "worker": "see LLM.apply_model and LLM.collective_rpc",
}


def check_module(name: str) -> None:
    """Raise for a missing module of the package that vLLM has; others are Python's to report.

    `importlib.util.find_spec` gets no error: None is its answer.
    """
    why = MODULES.get(name.partition(".")[2])
    if why is not None and not _is_just_asked():
        raise ModuleNotFoundError(f"No module named {name!r}, which is vLLM's: {why}", name=name)


def _is_just_asked() -> bool:
    """Whether the caller of the finders looks for a module without importing it."""
    frame = sys._getframe(2)  # the finder
    for _ in range(2):  # Python asks all finders, for its import or for `find_spec`
        frame = frame.f_back or frame
    return frame.f_globals.get("__name__") == "importlib.util"
