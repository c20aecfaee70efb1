"""Routing: how a router chooses K of E experts for each token, and their shares. Plain data."""

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid", "softmax of chosen", "sparse mixer"]


@dataclass(frozen=True)
class ExpertGroups:
    """Only experts of the `chosen` best of `number` equal groups can be chosen.

    A group is as good as the sum of its `best` largest scores.
    """

    number: int
    chosen: int
    best: int = 2


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choices of a router that takes the `per_token` largest scores.

    `scores` says what a share is before it is finished: the softmax over all experts, the sigmoid
    of the expert's own output, or the softmax over the chosen experts alone, which are then chosen
    by the router's outputs. With `has_bias`, a bias for each expert is added to its score for the
    choice, and not in its share. With `normalized`, the shares of a token sum to one: they are
    divided by their sum, to which `tiny` is added, as all may be zero; a sum below `least` counts
    as `least`. They are then multiplied by `scale`. A `soft_cap` c replaces each output o of the
    router by c * tanh(o / c), before all else. `plain/sparse_mixer.py` defines "sparse mixer" with
    its `margin`, which goes with none of these.
    """

    per_token: int
    normalized: bool
    scores: Scores = "softmax"
    has_bias: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    margin: float = 0.0
    tiny: float = 1e-20
    least: float = 0.0
    soft_cap: float | None = None

    @property
    def sums_to_one(self) -> bool:
        """Whether a token's shares sum to one, before they are multiplied by `scale`."""
        return self.normalized or self.scores == "softmax of chosen"

    @property
    def is_fused(self) -> bool:
        """Whether one kernel can compute scores, choice and shares."""
        plain = self.groups is None and not self.least and self.soft_cap is None
        if self.scores == "softmax of chosen":  # which equals a softmax whose shares sum to one
            return plain and not self.has_bias and self.scale == 1.0
        return plain and self.scores in ("softmax", "sigmoid")
