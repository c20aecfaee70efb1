"""Family: how models of one or several architectures are read and built. `MODELS` lists them.

A family's module is imported when a checkpoint names its architecture. No PyTorch here.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanovllm.formats.names import USUAL_NAMES, Names

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Family(Generic[ConfigT]):
    """A family of models.

    `read` makes a `ModelConfig`, or a subclass of it, from the fields of a `config.json`. It raises
    a ValueError that names the field for a value that it does not support. `build` makes the model
    from that config, without values in its parameters; if it is None, the model has the form of
    Llama. `names` says what checkpoints call the tensors. `draft_layer` changes a config so that
    layer 0 is that of the draft head which checkpoints carry.
    """

    read: Callable[[Mapping[str, Any]], ConfigT]
    build: "Callable[[ConfigT, Build], CausalLM] | None" = None
    names: Names = USUAL_NAMES
    draft_layer: Callable[[ConfigT], ConfigT] | None = None


# The modules of this package's families. Each has a `FAMILY`.
MODELS: Mapping[str, str] = {
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe",
    "GraniteMoeForCausalLM": "granite_moe", "OlmoeForCausalLM": "olmoe",
    "PhimoeForCausalLM": "phimoe", "PhiMoEForCausalLM": "phimoe", "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite", "SeedOssForCausalLM": "seed_oss",
    "Ministral3ForCausalLM": "ministral3", "HunYuanDenseV1ForCausalLM": "hunyuan_dense",
    "Exaone4ForCausalLM": "exaone4", "Ernie4_5ForCausalLM": "ernie4_5", "Glm4ForCausalLM": "glm4",
    "HeliumForCausalLM": "helium", "NanoChatForCausalLM": "nanochat", "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2", "GPTNeoXForCausalLM": "gpt_neox", "GPT2LMHeadModel": "gpt2",
    "PhiForCausalLM": "phi", "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2", "NemotronForCausalLM": "nemotron",
    "FalconForCausalLM": "falcon", "ArceeForCausalLM": "arcee", "ApertusForCausalLM": "apertus",
    "Gemma3nForCausalLM": "gemma3n", "Gemma3nForConditionalGeneration": "gemma3n_conditional",
    "Gemma4ForCausalLM": "gemma4", "Gemma4ForConditionalGeneration": "gemma4_conditional",
    "GptOssForCausalLM": "gpt_oss", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "Gemma3ForConditionalGeneration": "gemma3_conditional",
    "Qwen3_5ForCausalLM": "qwen3_5", "Qwen3_5ForConditionalGeneration": "qwen3_5_conditional",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_conditional",
    "Qwen3NextForCausalLM": "qwen3_next", "OlmoHybridForCausalLM": "olmo_hybrid",
}  # fmt: skip
# Families from outside of this package, which `outside.py` registers. A family that another process
# has registered and that cannot be imported here is an empty string.
registered: dict[str, str | Family[Any]] = {}


def architectures() -> list[str]:
    """All architectures that have a family."""
    return [*dict.fromkeys((*MODELS, *registered))]


def family_of(name: object, reference: str = "") -> Family[Any]:
    """The family of an architecture. An unknown one is a ValueError; no similar one is taken.

    The `reference` of a config that another process read says where to import the family.
    """
    if reference or name in registered:
        from nanovllm.models.imported import imported

        found = reference or registered[str(name)]
        return found if isinstance(found, Family) else imported(str(name), found, Family)
    if not isinstance(name, str) or name not in MODELS:
        from nanovllm.models.imported import unknown

        raise unknown(name, architectures())
    family: Family[Any] = importlib.import_module(f"{__package__}.{MODELS[name]}").FAMILY
    return family
