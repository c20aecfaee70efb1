"""nanovllm: exact, small, fast offline inference of large language models.

    from nanovllm import LLM, SamplingParams

Importing the package takes no time: each name is imported when it is first used. Only `LLM`
and `AsyncLLM` import PyTorch.
"""

TYPE_CHECKING = False  # `typing` takes milliseconds
if TYPE_CHECKING:
    from typing import Any

    from nanovllm.async_llm import AsyncLLM
    from nanovllm.beam_search_params import BeamSearchParams
    from nanovllm.beams.outputs import BeamSearchOutput
    from nanovllm.engine.errors import RankError
    from nanovllm.llm import LLM
    from nanovllm.lora_request import LoRARequest
    from nanovllm.models.outside import register_model
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.prompts import TextPrompt, TokensPrompt
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.structured_outputs import StructuredOutputs, StructuredOutputsParams
    from nanovllm.vectors.outputs import (
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput", "BeamSearchParams",
    "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EngineArgs", "LLMEngine",
    "LoRARequest", "PoolingOutput", "PoolingParams", "PoolingRequestOutput", "PromptType",
    "RankError", "RequestOutput", "SamplingParams", "ScoringOutput", "ScoringRequestOutput",
    "StructuredOutputs", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "register_model",
]  # fmt: skip
_MODULES = {
    "LLM": "llm", "AsyncLLM": "async_llm", "RankError": "engine.errors",
    "BeamSearchOutput": "beams.outputs", "BeamSearchParams": "beam_search_params",
    "LoRARequest": "lora_request", "PoolingParams": "pooling_params",
    "SamplingParams": "sampling_params", "register_model": "models.outside",
    **dict.fromkeys(["CompletionOutput", "RequestOutput"], "outputs"),
    **dict.fromkeys(["StructuredOutputs", "StructuredOutputsParams"], "structured_outputs"),
    **dict.fromkeys(["PromptType", "TextPrompt", "TokensPrompt"], "prompts"),
    "EngineArgs": "from_vllm.engine_args", "AsyncEngineArgs": "from_vllm.engine_args",
    "LLMEngine": "from_vllm.llm_engine", "AsyncLLMEngine": "from_vllm.async_llm",
}  # fmt: skip
_VECTORS = ("Embedding", "Pooling", "Scoring")  # of names of outputs


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"nanovllm.{_MODULES[name]}"), name)
    except AttributeError as error:  # which Python would report as a name that does not exist
        raise ImportError(f"nanovllm cannot be imported: {error}") from error
