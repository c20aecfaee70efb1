"""Places: the parts of a checkpoint's tensor that a rank has, and their memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from nanovllm.formats.stored import Loaded

# Attributes of tensors without values: where they are, and whether they are transposed.
INDEX, TRANSPOSED = "_nanovllm_index", "_nanovllm_transposed"


class Place(NamedTuple):
    """A part of a rank's memory, and the index of its values in the checkpoint's tensor.

    The memory has the checkpoint's dimensions: it is a transposed view if the layer's differ.
    """

    memory: torch.Tensor
    index: Any  # `...` for the whole tensor

    def part(self, tensor: Loaded) -> torch.Tensor:
        """The part of the checkpoint's tensor that is stored here."""
        if self.index is ... and isinstance(tensor, torch.Tensor):
            return tensor
        return tensor[self.index]


@dataclass(frozen=True)
class Shape:
    """A checkpoint's tensor without values: copies of its parts record their indices."""

    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = torch.empty(self.shape, device="meta")[index]
        of_slices = isinstance(index, tuple) and all(isinstance(each, slice) for each in index)
        is_whole = of_slices and part.shape == self.shape
        setattr(part, INDEX, ... if is_whole else index)
        return part


class _Copies(TorchFunctionMode):
    """Records the copies of tensors without values, instead of making them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and hasattr(args[1], INDEX):
            memory = args[0].t() if hasattr(args[1], TRANSPOSED) else args[0]
            self.places.append(Place(memory, getattr(args[1], INDEX)))
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.t and hasattr(args[0], INDEX):
            setattr(result, INDEX, getattr(args[0], INDEX))
            setattr(result, TRANSPOSED, True)
        return result


def places_of(load: Callable[[Shape], None], shape: tuple[int, ...]) -> list[Place]:
    """Where `load` copies the parts of a tensor of this shape. It copies nothing."""
    copies = _Copies()
    with copies:
        load(Shape(shape))
    return copies.places
