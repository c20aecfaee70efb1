"""Family: how the models of one or several architectures are read and built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanovllm.formats.names import USUAL_NAMES, Names

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.build import Build
    from nanovllm.models.decoder import CausalLM

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Family(Generic[ConfigT]):
    """A family of models.

    `read` makes a `ModelConfig`, or a subclass of it, of the fields of a `config.json`. What it
    does not support is a ValueError that names the field. `build` makes the model of that, with
    parameters that are not filled yet; None: in the form of Llama. `names` says what
    checkpoints call its tensors.
    """

    read: Callable[[Mapping[str, Any]], ConfigT]
    build: "Callable[[ConfigT, Build], CausalLM] | None" = None
    names: Names = USUAL_NAMES
