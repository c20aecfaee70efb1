"""Family: how models of one or several architectures are read and built. families.json lists them.

A family's module is imported when a checkpoint names its architecture. No PyTorch here.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
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


# The modules of this package's families, by architecture. Each has a `FAMILY`.
MODELS: Mapping[str, str] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
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
