"""What fits in a memory next to a model's weights: KV of tokens, and states. Plain arithmetic."""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.config import NUM_SEQS
from nanovllm.engine.cache.state_pool import KV_PER_CHECKPOINT_BYTE
from nanovllm.engine.cache.state_slots import NUM_RESERVED
from nanovllm.engine.start.running_states import SHARES, fitting_sequences


class Fit(NamedTuple):
    """How many tokens of KV fit, and the states of how many running sequences."""

    kv_tokens: int
    num_seqs: int


@dataclass(frozen=True)
class Needs:
    """Bytes of all weights, of a token's KV, and of the states after one token.

    A running sequence has states in `slots_each` slots.
    """

    weights: int
    kv_of_token: int
    states: int
    slots_each: int

    def fit(self, memory: int, max_num_seqs: int | None, caches_prefixes: bool) -> Fit:
        """What fits in the `memory` of a GPU; activations are not counted.

        The states of all running sequences are reserved. If prefixes are cached, checkpoints of
        states share the rest with KV.
        """
        most, of_sequence = max_num_seqs or NUM_SEQS["cuda"], self.slots_each * self.states
        if self.states and max_num_seqs is None:
            most = fitting_sequences(most, of_sequence, SHARES["cuda"] * memory)
        left = memory - self.weights
        if self.states:
            left -= most * of_sequence + NUM_RESERVED * self.states
        if left < 0:
            return Fit(0, 0)
        if self.states and caches_prefixes:
            left = left * KV_PER_CHECKPOINT_BYTE // (KV_PER_CHECKPOINT_BYTE + 1)
        return Fit(left // self.kv_of_token if self.kv_of_token else 0, most)
