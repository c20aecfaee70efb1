"""A layer behind those of the model, in its files, which predicts a later token. No PyTorch here.

It has the form of Qwen3-Next's draft head, under other names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.models.decoder import CausalLM

PREFIX = "mtp."  # of the head's modules, and of its tensors in the files of other families
# The beginnings of names within the layer, and those of the head's modules.
PARTS = {
    "eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.", "": "layers.0.",
}  # fmt: skip
COPIES = ("embed_tokens.", "shared_head.head.")  # of the model's own tables


@dataclass(frozen=True, kw_only=True)
class LaterLayersConfig(ModelConfig):
    """The files have `num_later` layers behind those of the model."""

    num_later: int = 0

    @property
    def later(self) -> tuple[str, ...]:
        """The beginning of the names of each of these layers' tensors."""
        first = self.num_hidden_layers
        return tuple(f"model.layers.{index}." for index in range(first, first + self.num_later))


def head_prefixes(layer: str, above: str = PREFIX) -> Mapping[str, str]:
    """The names of the draft head's modules in `above`, by those in a `layer` of the files."""
    return {f"{layer}{theirs}": f"{above}{ours}" for theirs, ours in PARTS.items()}


def copies(layer: str) -> tuple[str, ...]:
    """The beginnings of the names of tensors that repeat the model's own."""
    return tuple(f"{layer}{name}" for name in COPIES)


def without_later(model: "CausalLM", config: LaterLayersConfig) -> "CausalLM":
    """The model, which skips the later layers. Their names are those of a head that has the first.

    A model with this head (`ModelWithHead`) skips less.
    """
    if config.later:
        (first, *_), names = config.later, model.names
        model.names = replace(
            names,
            prefixes={**head_prefixes(first), **names.prefixes},
            skipped=(*names.skipped, *config.later, *copies(first)),
        )
    return model
