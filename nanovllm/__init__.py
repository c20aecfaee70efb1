"""nanovllm: exact, small, fast offline inference of large language models.

    from nanovllm import LLM, SamplingParams

Importing the package takes milliseconds: PyTorch is imported at the first access to `LLM`.
"""

from typing import TYPE_CHECKING, Any

from nanovllm.engine.ranks.errors import RankError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.prompts import TextPrompt, TokensPrompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "RankError",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        try:
            from nanovllm.llm import LLM
        except AttributeError as error:  # else it would look as if there were no LLM
            raise ImportError(f"nanovllm cannot be imported: {error}") from error
        return LLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
