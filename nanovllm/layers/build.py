"""Build: what the layers of a model are made with, on one rank."""

from dataclasses import dataclass, replace

from nanovllm.formats.format import Formats
from nanovllm.layers.ranks import Ranks


@dataclass(frozen=True)
class Build:
    """The ranks that share a model, and how the weights of a module are stored.

    The ranks split each expert, or each rank has `whole_experts`. Sequences have at most
    `max_positions` tokens.
    """

    ranks: Ranks
    formats: Formats
    max_positions: int
    whole_experts: bool = False

    def inside(self, name: str) -> "Build":
        """For the layers of the module `name`, which may have several parts: `layers.3`."""
        return replace(self, formats=self.formats.inside(name))
