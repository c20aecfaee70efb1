"""The text of Mistral Small 3.1, 3.2 and 4 and of Ministral 3, whose checkpoints also see."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models import ministral3, mistral, mistral4
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.ministral3 import Ministral3Config
from nanovllm.models.mistral4 import Mistral4Config
from nanovllm.models.text_part import SEEING_NAMES, text_part
from nanovllm.utils.checks import check_choice

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS = mistral.DEFAULTS
FAMILIES = {"mistral": mistral, "ministral3": ministral3, "mistral4": mistral4}  # of the text


def read(file: Mapping[str, Any]) -> ModelConfig:
    """The fields are those of `text_config`, of the family that its `model_type` names."""
    text = text_part(file)
    kind = check_choice("text_config: model_type", text.get("model_type", "mistral"), FAMILIES)
    config: ModelConfig = FAMILIES[kind].FAMILY.read(text)
    return config


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Compose the text model."""
    if isinstance(config, Ministral3Config):
        return ministral3.build(config, make)
    if isinstance(config, Mistral4Config):
        return mistral4.build(config, make)
    from nanovllm.models import parts

    return parts.usual_model(config, make)


FAMILY = Family(read, build, SEEING_NAMES)
