"""The parameters with which the heads of a recurrence turn a token's numbers into its gates."""

from typing import NamedTuple

import torch


class DeltaRates(NamedTuple):
    """The heads of a gated delta rule.

    A head forgets by exp(-exp(log_rate) * softplus(a + bias)), and learns by most * sigmoid(b).
    """

    log_rate: torch.Tensor  # [H] in float32
    bias: torch.Tensor  # [H] in float32
    most: float = 1.0


class ChannelRates(NamedTuple):
    """The heads of a gated delta rule whose Dk channels of keys forget by themselves.

    A channel forgets by exp(-exp(log_rate) * softplus(a + bias)). With a `lowest` logarithm it
    forgets by exp(lowest * sigmoid(exp(log_rate) * (a + bias))), which is never less than
    exp(lowest).
    """

    log_rate: torch.Tensor  # [H] in float32
    bias: torch.Tensor  # [H * Dk] in float32
    lowest: float | None = None


class SpaceRates(NamedTuple):
    """The heads of a state space.

    A token's time step is softplus(dt + bias), not below `low` and not above `high`. In it a head
    forgets by exp(-exp(log_rate) * step). `skip` times the input is added to the output.
    """

    log_rate: torch.Tensor  # [H] in float32
    bias: torch.Tensor  # [H] in float32
    skip: torch.Tensor  # [H] in float32
    low: float = 0.0
    high: float = float("inf")
