"""Checks of what a family from outside of this package builds. The tests check our own."""

from nanovllm.layers.cache_spec import TokenCache
from nanovllm.layers.ranks import Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM


def check_model(config: ModelConfig, model: object, ranks: Ranks) -> None:
    """Raise if this is no model, or a layer keeps something else than its shape says.

    Memory is planned by the shapes.
    """
    if not isinstance(model, CausalLM):
        raise TypeError(f"the family of {config.architecture} must build a CausalLM, got {model!r}")
    shapes = [(i, cache) for i, layer in enumerate(config.layers) for cache in layer.cache.each]
    for (index, said), mixer in zip(shapes, model.mixers, strict=True):
        kept = mixer.cache
        if isinstance(said, TokenCache):
            said = said.part(ranks.size)
        # A part of a state is as the family makes it: ranks split each tensor in a way of its own.
        if type(said) is not type(kept) or (isinstance(said, TokenCache) and said != kept):
            raise ValueError(
                f"layer {index} of {config.architecture} keeps {kept}, and the family's"
                f" `layer_shape` says {said}"
            )
