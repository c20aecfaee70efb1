"""Register families of models from outside of this package, and let other processes find them."""

import sys
from collections.abc import Mapping
from typing import Any

from nanovllm.models.family import Family, registered
from nanovllm.models.imported import not_importable


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
    registered[name] = family


def registered_families() -> dict[str, str]:
    """The registered families by reference, for `register_families` in other processes."""
    return {name: family_reference(name) for name in registered}


def register_families(references: Mapping[str, str]) -> None:
    """Register the families that another process got from `registered_families`."""
    registered.update(references)


def family_reference(name: str) -> str:
    """Where other processes find the family of an architecture, as "module:NAME".

    Empty for a family of this package, which needs no reference, and for one that is not
    importable.
    """
    family = registered.get(name, "")
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
    if name in registered and not family_reference(name):
        raise not_importable(name)
