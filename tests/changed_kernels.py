"""Sets of kernels in which tests replace some operations."""

from typing import Any

from nanovllm.kernels.table import Kernels


def changed(kernels: Kernels, **changes: Any) -> Kernels:
    """A copy of a set with other flags or operations."""
    at_hand = {key: value for key, value in vars(kernels).items() if key not in kernels._places}
    places = at_hand.pop("_places")
    return Kernels(places=places, **(at_hand | changes))
