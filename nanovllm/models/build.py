"""Building a model: by its config's family, for one rank."""

from nanovllm.layers.build import Build
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models import registry
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.formats import PLAIN_FORMATS, Formats


def build_model(
    config: ModelConfig,
    max_positions: int,
    ranks: Ranks = ALONE,
    whole_experts: bool = False,
    formats: Formats = PLAIN_FORMATS,
) -> CausalLM:
    """The model with parameters that are not filled, in PyTorch's default type and device."""
    return made_with(config, Build(ranks, formats, max_positions, whole_experts))


def made_with(config: ModelConfig, make: Build) -> CausalLM:
    """The model of a config."""
    # Another process than the one that has read the config may not know its architecture.
    found = config.family
    family = registry.imported(found) if found else registry.family_of(config.architecture)
    model: CausalLM = family.build(config, make)
    return model
