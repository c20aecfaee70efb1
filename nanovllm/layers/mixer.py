"""Mixer: the part of a block in which a token reads the tokens before it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.table import Rounding
from nanovllm.layers.cache_spec import CacheSpec, State

Ropes = Mapping[str, Rope]  # a step's cosines and sines, by the name that the decoder gives a rope


class Mixer(nn.Module):
    """Owns its projections, and says what it keeps between steps: `cache`, on this rank.

    A step calls `mix` for all of its tokens, and then `project` for the rows that are needed:
    after the last layer few are. The layers' context has the step's sequences and slots.
    """

    cache: CacheSpec

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for mixers that use the same kernels; it can be hashed."""
        return type(self), self.cache

    def rounding(self, x: torch.Tensor) -> Rounding | None:  # noqa: ARG002
        """The rounding of len(x) rows: `mix` takes rounded rows, too. None: there is none."""
        return None

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        """Hidden states [T, hidden] -> [T, N], and the step's tokens enter the cache."""
        raise NotImplementedError

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        """Rows [R, N] -> [R, hidden], which the ranks must sum up."""
        raise NotImplementedError


class StateMixer(Mixer):
    """A mixer that keeps a state of fixed size for each sequence.

    `states` has a tensor [slots, ...] for each tensor of its `cache`. A step calls `mix` once for
    all of its tokens. `state_step()` says in which slots it finds the states before them and leaves
    those after them; its `batches` are what a loop over the tokens needs.
    """

    cache: State
    states: tuple[torch.Tensor, ...] = ()

    def set_states(self, states: Iterable[torch.Tensor]) -> None:
        """Keep states in these tensors."""
        self.states = tuple(states)
