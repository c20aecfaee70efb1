"""Import families of models from outside of this package."""

import importlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
USUAL = "ForCausalLM"  # end of most architectures' names


def imported(name: str, reference: str, kind: type[T]) -> T:
    """The family of the architecture `name`, a `kind`, at the `reference` "module:NAME".

    The reference is empty for a family that another process has registered, and that cannot be
    imported here.
    """
    if not reference:
        raise not_importable(name)
    module, _, attribute = reference.partition(":")
    try:
        family = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the family of models {reference!r} cannot be imported: {error}"
        ) from error
    if not isinstance(family, kind):
        raise TypeError(f"{reference!r} must be a {kind.__name__}, got {family!r}")
    return family


def unknown(name: object, known: Sequence[str]) -> ValueError:
    """The error about an architecture that is none of the `known` ones, which it lists in short."""
    usual = [each.removesuffix(USUAL) for each in known if each.endswith(USUAL)]
    others = [each for each in known if not each.endswith(USUAL)]
    usual[0] += USUAL
    return ValueError(
        f"architecture {name!r} is not supported; architectures: {usual[0]}, with the same ending"
        f" {', '.join(usual[1:])}; and {', '.join(others)}"
    )


def not_importable(name: str) -> ValueError:
    """The error about a registered family that other processes would need to import."""
    return ValueError(
        f"the family of {name!r} is not at the top of a module that can be imported, as an"
        ' engine of several processes needs it; put it there, or register it as "module:NAME"'
    )
