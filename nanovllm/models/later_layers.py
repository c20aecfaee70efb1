"""A layer behind those of the model, in its files, which predicts a later token. No PyTorch here.

It has the form of Qwen3-Next's draft head, under other names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.spellings import respelt
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.models.decoder import CausalLM

PREFIX = "mtp."  # of the head's modules, and of its tensors in the files of other families
# The beginnings of names within the layer, and those of the head's modules.
PARTS = {
    "eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.", "": "layers.0.",
}  # fmt: skip
NUMBER = "num_nextn_predict_layers"
OTHER_NAME = {"num_mtp_layers": NUMBER}
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


def number_of_later(file: Mapping[str, Any]) -> int:
    """The number of layers behind those of the model: one, if the file does not say it."""
    given = {n: file[n] for n in (NUMBER, *OTHER_NAME) if file.get(n) is not None}
    return check_int(NUMBER, respelt(given, OTHER_NAME, both=True).get(NUMBER, 1), 0)


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
