"""What `nanovllm` exports besides `LLM` and `SamplingParams`, and errors for other names."""

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM as AsyncLLM
    from nanovllm.beam_search_params import BeamSearchParams as BeamSearchParams
    from nanovllm.beams.outputs import BeamSearchOutput as BeamSearchOutput
    from nanovllm.engine.errors import RankError as RankError
    from nanovllm.from_vllm.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from nanovllm.from_vllm.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from nanovllm.from_vllm.engine_args import EngineArgs as EngineArgs
    from nanovllm.from_vllm.llm_engine import LLMEngine as LLMEngine
    from nanovllm.lora_request import LoRARequest as LoRARequest
    from nanovllm.models.outside import register_model as register_model
    from nanovllm.output_kind import RequestOutputKind as RequestOutputKind
    from nanovllm.outputs import CompletionOutput as CompletionOutput
    from nanovllm.outputs import RequestOutput as RequestOutput
    from nanovllm.pooling_params import PoolingParams as PoolingParams
    from nanovllm.prompts import PromptType as PromptType
    from nanovllm.prompts import TextPrompt as TextPrompt
    from nanovllm.prompts import TokensPrompt as TokensPrompt
    from nanovllm.structured_outputs import StructuredOutputs as StructuredOutputs
    from nanovllm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from nanovllm.vectors.outputs import (
        EmbeddingOutput as EmbeddingOutput,
    )
    from nanovllm.vectors.outputs import (
        EmbeddingRequestOutput as EmbeddingRequestOutput,
    )
    from nanovllm.vectors.outputs import (
        PoolingOutput as PoolingOutput,
    )
    from nanovllm.vectors.outputs import (
        PoolingRequestOutput as PoolingRequestOutput,
    )
    from nanovllm.vectors.outputs import (
        ScoringOutput as ScoringOutput,
    )
    from nanovllm.vectors.outputs import (
        ScoringRequestOutput as ScoringRequestOutput,
    )

MODULES = {
    "AsyncLLM": "async_llm", "RankError": "engine.errors", "BeamSearchOutput": "beams.outputs",
    "BeamSearchParams": "beam_search_params", "LoRARequest": "lora_request",
    "PoolingParams": "pooling_params", "register_model": "models.outside",
    **dict.fromkeys(["CompletionOutput", "RequestOutput"], "outputs"),
    **dict.fromkeys(["StructuredOutputs", "StructuredOutputsParams"], "structured_outputs"),
    **dict.fromkeys(["PromptType", "TextPrompt", "TokensPrompt"], "prompts"),
    **dict.fromkeys(["EngineArgs", "AsyncEngineArgs"], "from_vllm.engine_args"),
    "LLMEngine": "from_vllm.llm_engine", "AsyncLLMEngine": "from_vllm.async_llm",
    "RequestOutputKind": "output_kind",
    **{
        f"{kind}{what}Output": "vectors.outputs"
        for kind in ("Embedding", "Pooling", "Scoring")
        for what in ("", "Request")
    },
}  # fmt: skip
BESIDE = {  # classes that vLLM has in a module, which is here without them
    "sampling_params": ("BeamSearchParams", "RequestOutputKind", "StructuredOutputsParams"),
    "outputs": tuple(name for name, module in MODULES.items() if module == "vectors.outputs"),
}


def add_names(modules: dict[str, str], name: str) -> None:
    """Add all names with their modules; raise if `name` is not one of them."""
    modules.update(MODULES)
    if name not in modules:
        raise missing("nanovllm", name)


def name_beside(module: str, name: str) -> object:
    """A class that vLLM has in this module of the package; raises if it is another name."""
    if name not in BESIDE.get(module, ()):
        raise missing(f"nanovllm.{module}", name)
    return getattr(importlib.import_module(f"nanovllm.{MODULES[name]}"), name)


def missing(module: str, name: str) -> Exception:
    """The error for a name that a module does not have.

    `from nanovllm import X` shows the text of an ImportError, and not that of an AttributeError,
    which is right for names that vLLM does not have: `hasattr` asks for them.
    """
    from nanovllm.from_vllm.names.modules import MODULES as VLLM_MODULES
    from nanovllm.from_vllm.names.python import EXPORTS

    why = EXPORTS.get(name) or VLLM_MODULES.get(f"{module}.{name}".partition(".")[2])
    if why is not None:
        return ImportError(f"cannot import name {name!r} from {module!r}: {why}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
