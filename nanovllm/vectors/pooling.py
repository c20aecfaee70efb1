"""KeptStates: the hidden states of a prompt that a request keeps instead of sampling tokens.

These are the states after the final norm. A request with labels keeps no states: it keeps how
likely each of these tokens is after the prompt.
"""

from typing import Literal, NamedTuple

import numpy as np

from nanovllm.engine.requests.logprobs import Entry
from nanovllm.engine.run.reports import scheduled_of
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence

Pooling = Literal["last", "cls", "mean", "all"]
VECTOR_POOLINGS: tuple[Pooling, ...] = ("last", "cls", "mean")
POOLINGS: tuple[Pooling, ...] = (*VECTOR_POOLINGS, "all")


class PoolingTask(NamedTuple):
    """The purpose of a request without generated tokens: states, or how likely labels are."""

    pooling: Pooling
    labels: tuple[int, ...] = ()

    def keeper(self, num_tokens: int) -> "KeptStates":
        """Make the object that keeps the states of a prompt of this length."""
        return KeptStates(self.pooling, num_tokens, self.labels)


class KeptStates:
    """The states of the last, the first ("cls") or all tokens, or their mean, as they arrive.

    `wanted` are the prompt's tokens that have no states yet; the request ends when there are none.
    States arrive in order. States that a preempted sequence has are not sent again. They are kept
    as NumPy arrays: a tensor takes ten times as long to send to another process.
    """

    generates = False  # whether the request samples tokens

    def __init__(self, pooling: Pooling, num_tokens: int, labels: tuple[int, ...] = ()) -> None:
        start = num_tokens - 1 if pooling == "last" else 0
        self.pooling, self.num_tokens, self.labels = pooling, num_tokens, labels
        self.wanted = range(start, 1 if pooling == "cls" else num_tokens)
        self.logprobs: list[float] = []  # of the labels
        self._parts: dict[int, Array] = {}  # by first token: states, or their sum

    @property
    def asked(self) -> PoolingTask:
        """The task that it was made for."""
        return PoolingTask(self.pooling, self.labels)

    @property
    def num_kept(self) -> int:
        """How many states the result has."""
        return self.num_tokens if self.pooling == "all" else 1

    @property
    def adds_up(self) -> bool:
        """Whether the sum of the states is enough."""
        return self.pooling == "mean"

    def scheduled(self, seq: Sequence) -> range:
        """Those of the tokens that a step computes that are wanted."""
        return scheduled_of(seq, self.wanted)

    def add_states(self, tokens: range, states: Array) -> None:
        """Keep the states of `tokens`, [tokens, hidden] in float32, or their sum, [1, hidden]."""
        self._parts[tokens.start] = states
        self.wanted = range(tokens.stop, self.wanted.stop)

    def add(self, _seq: Sequence, index: int, entry: Entry) -> None:
        """Keep the log-probability of the label at `index`. Labels come in order, in one step."""
        self.logprobs[index:] = [entry[0][1]]
        if len(self.logprobs) == len(self.labels):
            self.wanted = range(self.num_tokens, self.num_tokens)

    @property
    def result(self) -> Array:
        """The states in float32, [hidden] or [tokens, hidden] for "all", when nothing is wanted."""
        parts = [self._parts[start] for start in sorted(self._parts)]
        states = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.adds_up:
            mean: Array = states.sum(axis=0) / np.float32(self.num_tokens)
            return mean
        return states if self.pooling == "all" else states[0]
