"""Build: what the layers of a model are made with, on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from nanovllm.formats.format import WeightFormat
from nanovllm.formats.names import Names
from nanovllm.layers.ranks import Ranks


class Formats(Protocol):
    """How the weights of one module's layers are stored, by the names of checkpoints."""

    @property
    def names(self) -> Names: ...
    def inside(self, name: str) -> "Formats": ...
    def of(self, layer: str) -> WeightFormat: ...
    def in_float32(self, layer: str) -> WeightFormat: ...
    def of_experts(self, num_experts: int) -> Mapping[str, WeightFormat]: ...
    def has_kv_scales(self) -> bool: ...


@dataclass(frozen=True)
class Build:
    """The ranks that share a model, and how the weights of a module are stored.

    Of experts, the ranks split each one, or hold `whole_experts`. Sequences have at most
    `max_positions` tokens.
    """

    ranks: Ranks
    formats: Formats
    max_positions: int
    whole_experts: bool = False

    def inside(self, name: str) -> "Build":
        """For the layers of the module `name`, which may have several parts: `layers.3`."""
        return replace(self, formats=self.formats.inside(name))
