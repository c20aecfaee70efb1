"""What `nanovllm` exports besides `LLM` and `SamplingParams`, and what to use instead of others.

The others are names that `vllm` exports.
"""

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
BESIDE_PARAMS = ("BeamSearchParams", "RequestOutputKind", "StructuredOutputsParams")
INSTEAD = {
    "ModelRegistry": "use nanovllm.register_model(name, family): docs/adding_a_model.md",
    "initialize_ray_cluster": "nanovllm.ray runs engines on several machines: docs/ray.md",
    "ClassificationOutput": "no model classifies; LLM.score has scores of pairs",
    "ClassificationRequestOutput": "no model classifies; LLM.score has scores of pairs",
    "RewardRequestOutput": "no model rewards; LLM.encode has hidden states",
    "GuidedDecodingParams": "use StructuredOutputs: docs/structured.md",
    "FlexibleArgumentParser": "use argparse.ArgumentParser",
    "PoolerConfig": "pooling, normalize and dimensions are options of LLM.embed",
    "ExplicitEncoderDecoderPrompt": "models are decoders; use TextPrompt or TokensPrompt",
    "EmbedsPrompt": "prompts are texts or token ids; use TextPrompt or TokensPrompt",
    "PromptAdapterRequest": "use LoRARequest: docs/adapters.md",
}


def add_names(modules: dict[str, str], name: str) -> None:
    """Add all names with their modules; raise if `name` is not one of them.

    `from nanovllm import X` shows the text of an ImportError, and not that of an AttributeError,
    which is right for all other names: `hasattr` asks for them.
    """
    modules.update(MODULES)
    if name in INSTEAD:
        raise ImportError(f"cannot import name {name!r} from 'nanovllm': {INSTEAD[name]}")
    if name not in modules:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


def beside_params(name: str) -> object:
    """A class that vLLM has in the module of `SamplingParams`; raises if it is another name."""
    module = "nanovllm.sampling_params"
    if name in INSTEAD:
        raise ImportError(f"cannot import name {name!r} from {module!r}: {INSTEAD[name]}")
    if name not in BESIDE_PARAMS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nanovllm.{MODULES[name]}"), name)
