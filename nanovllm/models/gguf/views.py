"""Views: tensors in mapped memory, with the methods of a slice of a safetensors file."""

from typing import Any

import torch


class View:
    """A tensor in mapped memory, with the methods of a slice of a safetensors file.

    Blocks are uint8 [..., N, K / size, num_bytes], and their type's name is the dtype.
    """

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self.tensor, self._dtype = tensor, dtype

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor[index]


class Ordered(View):
    """Some elements of dimension `dim` of a tensor, in an order of their own.

    Only the elements of an index are copied, if the index has slices.
    """

    def __init__(self, view: View, elements: torch.Tensor, dim: int = 0) -> None:
        super().__init__(view.tensor, view.get_dtype())
        self.elements, self.dim = elements, dim

    def get_shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return (*shape[: self.dim], len(self.elements), *shape[self.dim + 1 :])

    def __getitem__(self, index: Any) -> torch.Tensor:
        index, dim = index if isinstance(index, tuple) else (index,), self.dim
        places = [*index, *[slice(None)] * (dim + 1 - len(index))]
        if not all(isinstance(place, slice | torch.Tensor) for place in places):
            return self.tensor.index_select(dim, self.elements)[index]
        wanted, places[dim] = self.elements[places[dim]], slice(None)
        before = self.tensor[tuple(places[:dim])] if dim else self.tensor
        return before.index_select(dim, wanted)[tuple(places)]


class Deinterleaved(Ordered):
    """A tensor whose rows have the two halves of each head in turn; they are read in order.

    Row 2 j + h of a head is row j of its half h.
    """

    def __init__(self, view: View, num_heads: int) -> None:
        rows = torch.arange(len(view.tensor), device="cpu")
        super().__init__(view, rows.view(num_heads, -1, 2).transpose(1, 2).flatten())
