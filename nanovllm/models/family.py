"""Family: how the models of one or several architectures are read and built; and all families.

A family's module is imported when a checkpoint names its architecture. No PyTorch here.
"""

import importlib
import sys
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


# The modules of this package's families. Each has a `FAMILY`.
MODELS: Mapping[str, str] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
}
# Empty for one that another process has registered, and that cannot be imported here.
_registered: dict[str, str | Family[Any]] = {}


def register_model(name: str, family: str | Family[Any]) -> None:
    """Run checkpoints of the architecture `name` by a family from outside of this package.

    `family` is a `Family`, or where one is found: "module:NAME". It replaces what was registered
    under the same name. Processes of an engine import the family by name: if several ranks share a
    model, or with AsyncLLM, it must be at the top of a module that can be imported.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be that of an architecture, got {name!r}")
    if isinstance(family, str):
        module, colon, attribute = family.partition(":")
        if not (module and colon and attribute.isidentifier()):
            raise ValueError(f'family must be a Family or "module:NAME", got {family!r}')
    elif not isinstance(family, Family):
        raise TypeError(f'family must be a Family or "module:NAME", got {family!r}')
    _registered[name] = family


def architectures() -> list[str]:
    """All architectures that have a family."""
    return [*dict.fromkeys((*MODELS, *_registered))]


def registered_families() -> dict[str, str]:
    """The registered families by reference, for `register_families` in other processes."""
    return {name: family_reference(name) for name in _registered}


def register_families(references: Mapping[str, str]) -> None:
    """Register what another process has, by `registered_families`."""
    _registered.update(references)


def family_of(name: object) -> Family[Any]:
    """The family of an architecture. An unknown one is a ValueError; no similar one is taken."""
    if not isinstance(name, str) or name not in architectures():
        known = ", ".join(architectures())
        raise ValueError(f"architecture {name!r} is not supported; architectures: one of {known}")
    if _registered.get(name) == "":
        check_importable(name)
    family = _registered.get(name, f"{__package__}.{MODELS.get(name)}:FAMILY")
    return family if isinstance(family, Family) else imported_family(family)


def imported_family(reference: str) -> Family[Any]:
    """The family at "module:NAME"."""
    module, _, attribute = reference.partition(":")
    try:
        family = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the family of models {reference!r} cannot be imported: {error}"
        ) from error
    if not isinstance(family, Family):
        raise TypeError(f"{reference!r} must be a Family, got {family!r}")
    return family


def family_reference(name: str) -> str:
    """Where other processes find the family of an architecture, as "module:NAME".

    Empty for those of this package, which they know, and for one that they could not import.
    """
    family = _registered.get(name, "")
    if isinstance(family, str):
        return family
    for module, content in [*sys.modules.items()]:
        if module not in ("__main__", "__mp_main__"):
            for attribute, value in [*getattr(content, "__dict__", {}).items()]:
                if value is family:
                    return f"{module}:{attribute}"
    return ""


def check_importable(name: str) -> None:
    """Raise a ValueError if other processes could not import the family of an architecture."""
    if name in _registered and not family_reference(name):
        raise ValueError(
            f"the family of {name!r} is not at the top of a module that can be imported, as an"
            ' engine of several processes needs it; put it there, or register it as "module:NAME"'
        )
