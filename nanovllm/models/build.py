"""Building a model: by its config's family, for one rank."""

from dataclasses import replace
from typing import Any

from nanovllm.formats.format import PLAIN_FORMATS, Formats
from nanovllm.layers.cache_spec import TokenCache
from nanovllm.layers.layer import Build
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.family import Family, family_of, imported_family
from nanovllm.models.parts import usual_model


def build_model(
    config: ModelConfig,
    max_positions: int,
    ranks: Ranks = ALONE,
    whole_experts: bool = False,
    formats: Formats = PLAIN_FORMATS,
) -> CausalLM:
    """The model with parameters that are not filled, in PyTorch's default type and device."""
    formats = replace(formats, names=_family_of(config).names)
    return made_with(config, Build(ranks, formats, max_positions, whole_experts))


def made_with(config: ModelConfig, make: Build) -> CausalLM:
    """As `build_model`, for what another model of the same config was made with."""
    build = _family_of(config).build or usual_model
    model: CausalLM = build(config, make)
    if not isinstance(model, CausalLM):
        raise TypeError(f"the family of {config.architecture} must build a CausalLM, got {model!r}")
    _check_caches(config, model, make.ranks)
    return model


def _check_caches(config: ModelConfig, model: CausalLM, ranks: Ranks) -> None:
    """Raise if a layer keeps something else than its shape says, by which memory is planned."""
    for index, (layer, mixer) in enumerate(zip(config.layers, model.mixers, strict=True)):
        said, kept = layer.cache, mixer.cache
        if isinstance(said, TokenCache):
            said = said.part(ranks.size)
        # A part of a state is as the family makes it: ranks split each tensor in a way of its own.
        if type(said) is not type(kept) or (isinstance(said, TokenCache) and said != kept):
            raise ValueError(
                f"layer {index} of {config.architecture} keeps {kept}, and the family's"
                f" `layer_shape` says {said}"
            )


def _family_of(config: ModelConfig) -> Family[Any]:
    """The family of a config, which may have been read by another process."""
    if config.family:
        return imported_family(config.family)
    return family_of(config.architecture)
