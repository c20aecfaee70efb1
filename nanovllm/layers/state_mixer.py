"""StateMixer: a mixer that keeps a state of fixed size for each sequence."""

import torch

from nanovllm.layers.cache_spec import State
from nanovllm.layers.mixer import Mixer


class StateMixer(Mixer):
    """Its `cache` is a `State`, and `states` has that of each slot: a tensor [slots, ...] for each.

    A step calls `mix` once for all of its tokens. `state_step()` says in which slots it finds the
    states before them and leaves those after them; its `batches` are what a loop over the tokens
    needs.
    """

    cache: State
    states: tuple[torch.Tensor, ...] = ()
