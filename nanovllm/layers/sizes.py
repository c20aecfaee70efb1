"""Sizes of parts of layers that configs have, too. No PyTorch here."""

from typing import NamedTuple


class PerLayer(NamedTuple):
    """The rows of the second embedding table, and the numbers of each layer in a row."""

    vocab_size: int
    size: int


class ExpertSizes(NamedTuple):
    """The experts of a layer; each token uses `per_token` of `num_experts`."""

    num_experts: int
    per_token: int
    intermediate_size: int


class AltUpSizes(NamedTuple):
    """The number of streams of hidden states, and the one that blocks compute.

    With `scales`, the gate of the second embedding reads that stream times trained numbers.
    """

    num_streams: int
    active: int
    scales: bool
