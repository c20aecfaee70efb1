"""Layer: the base class of layers with parameters.

Build: what layers are made with.
"""

from dataclasses import dataclass, replace

from torch import nn

from nanovllm.formats.format import Formats
from nanovllm.formats.stored import Loaded, copy_whole
from nanovllm.layers.backend import Backend
from nanovllm.layers.ranks import Ranks


@dataclass(frozen=True)
class Build:
    """What layers are made with: the ranks that share the model, and the formats of weights.

    The ranks split each expert, or each rank has `whole_experts`. Sequences have at most
    `max_positions` tokens.
    """

    ranks: Ranks
    formats: Formats
    max_positions: int
    whole_experts: bool = False

    def inside(self, name: str) -> "Build":
        """The same for the layers of the module `name`, which may have dots: `layers.3`."""
        return replace(self, formats=self.formats.inside(name))


class Layer(nn.Module):
    """A module that knows how its parameters are loaded, and which kernels it calls."""

    initial = 1.0  # the value of parameters that are not filled with random values

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill a part of `param` with this rank's part of a checkpoint's tensor.

        `shard_id` is the index of the tensor among the parts of a fused parameter; None means all.
        """
        assert shard_id is None
        copy_whole(param, loaded)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor that `weight_loader` takes."""
        assert shard_id is None
        return tuple(param.shape)

    def parts(self, name: str) -> list[str]:  # noqa: ARG002
        """The checkpoint's names, within this layer, for the parts of the parameter `name`.

        Their order gives `shard_id`. Empty if the checkpoint has the parameter as one tensor.
        """
        return []

    def bind(self, backend: Backend) -> None:
        """Set the kernels to call. Called once, after the weights are loaded."""
