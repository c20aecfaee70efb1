"""StateMixer: a mixer that keeps a state of fixed size for each sequence."""

from collections.abc import Iterable

import torch

from nanovllm.layers.cache_spec import State
from nanovllm.layers.mixer import Mixer


class StateMixer(Mixer):
    """A mixer that keeps a state of fixed size for each sequence.

    `states` has a tensor [slots, ...] for each tensor of its `cache`. A step calls `mix` once for
    all of its tokens. `state_step()` says which slots have the states before these tokens, and
    which slots receive the states after them. A loop over the tokens uses its `batches`.
    """

    cache: State
    states: tuple[torch.Tensor, ...] = ()

    def set_states(self, states: Iterable[torch.Tensor]) -> None:
        """Keep states in these tensors."""
        self.states = tuple(states)
