"""nanovllm: exact, small, fast offline inference of large language models.

    from nanovllm import LLM, SamplingParams

Importing the package takes no time: each name is imported when it is first used. Only `LLM`
and `AsyncLLM` import PyTorch.
"""

from os import environ as _environ
from sys import meta_path as _finders

# ruff: noqa: F405 - type checkers find the names of `__all__` in `exports`

TYPE_CHECKING = False  # `typing` takes milliseconds
if TYPE_CHECKING:
    from typing import Any

    from nanovllm.exports import *  # noqa: F403
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput", "BeamSearchParams",
    "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EngineArgs", "LLMEngine",
    "LoRARequest", "PoolingOutput", "PoolingParams", "PoolingRequestOutput", "PromptType",
    "RankError", "RequestOutput", "RequestOutputKind", "SamplingParams", "ScoringOutput",
    "ScoringRequestOutput", "StructuredOutputs", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt", "register_model",
]  # fmt: skip
_MODULES = {"LLM": "llm", "SamplingParams": "sampling_params"}  # `exports` has all others

if "NANOVLLM_LOG" in _environ:
    from nanovllm.utils.log import log_by_environment as _log_by_environment

    _log_by_environment(_environ["NANOVLLM_LOG"])


class _LastFinder:
    """It is asked for modules that do not exist: vLLM has some of them."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.startswith("nanovllm.") and not name.startswith("nanovllm.from_vllm"):
            from nanovllm.from_vllm.names.modules import check_module

            check_module(name)


_finders.append(_LastFinder)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _MODULES:
        importlib.import_module("nanovllm.exports").add_names(_MODULES, name)
    try:
        return getattr(importlib.import_module(f"nanovllm.{_MODULES[name]}"), name)
    except AttributeError as error:  # which Python would report as a name that does not exist
        raise ImportError(f"nanovllm cannot be imported: {error}") from error
