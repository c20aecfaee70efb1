"""The layer that makes keys and values of latents, of GGUF files that have both apart.

The converter stores the keys' part transposed, [heads, rank, plain], and [heads, value, rank].
"""

from typing import Any

import torch

from nanovllm.models.gguf.decoded import decoded
from nanovllm.models.gguf.hybrid_names import KEYS_OF_LATENTS, VALUES_OF_LATENTS
from nanovllm.models.gguf.views import View


class Expansion(View):
    """The rows of both parts, [heads * (plain + value), rank], in the order of checkpoints.

    Reading any of them decodes all.
    """

    def __init__(self, keys: View, values: View) -> None:
        super().__init__(keys.tensor, "F32")
        self.keys, self.values = decoded(keys), decoded(values)

    def get_shape(self) -> tuple[int, ...]:
        heads, rank, plain = self.keys.get_shape()
        return heads * (plain + self.values.get_shape()[1]), rank

    def __getitem__(self, index: Any) -> torch.Tensor:
        keys, values = self.keys[:].float().mT, self.values[:].float()
        return torch.cat([keys, values], 1).flatten(0, 1)[index]


def values_name(name: str) -> str:
    """The name of the values' part next to the keys' part `name`."""
    return name.replace(KEYS_OF_LATENTS, VALUES_OF_LATENTS)


def expansion(name: str, keys: View, values: View | None) -> View:
    """The whole of the part `name` and the other one, which may be in another file."""
    other = values_name(name)
    if values is None:
        raise ValueError(f"tensor {name!r} needs {other!r}, which the model's files lack")
    shapes = [decoded(part).get_shape() for part in (keys, values)]
    if any(len(shape) != 3 for shape in shapes) or shapes[0][:2] != shapes[1][::2]:
        raise ValueError(f"tensors {name!r} and {other!r} do not fit together: {shapes}")
    return Expansion(keys, values)
