"""StateSpace: the sizes of a layer's state space. Plain data: no PyTorch."""

from dataclasses import dataclass, replace

from nanovllm.layers.cache_spec import State, StateTensor

INF = float("inf")


@dataclass(frozen=True)
class GroupedState(State):
    """The state of heads that share groups: all ranks together have `num_groups`."""

    num_groups: int


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A state space of `num_heads` heads of `head_dim` channels, as in Mamba 2.

    Each head has a state [head_dim, state_size]. The heads of a group share B and C [state_size].
    A convolution of `width` tokens filters the channels, B and C. `norm` says whether a gate
    multiplies the output before it is normalized ("gate first"), after that ("gate last"), or
    without a norm (None). Time steps are between `low` and `high`.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    in_bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: str | None = "gate first"
    low: float = 0.0
    high: float = INF

    @property
    def inner(self) -> int:
        """The channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def filtered(self) -> tuple[int, int, int]:
        """The widths of what the convolution filters: the heads' channels, B and C."""
        in_groups = self.num_groups * self.state_size
        return self.inner, in_groups, in_groups

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of what the projection makes: the gate, the filtered, and the time steps."""
        return self.inner, *self.filtered, self.num_heads

    @property
    def state(self) -> GroupedState:
        """What the layer keeps: the last inputs of the convolution, and the heads' states."""
        of_conv = StateTensor((self.width - 1, sum(self.filtered)))
        of_heads = StateTensor((self.num_heads, self.head_dim, self.state_size), in_float32=True)
        return GroupedState((of_conv, of_heads), self.num_groups)

    def part(self, num_ranks: int) -> "StateSpace":
        """The part of each rank. With fewer groups than ranks, several ranks have the same one."""
        groups = max(1, self.num_groups // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=groups)

    def num_others(self, hidden_size: int) -> int:
        """The parameters of a layer besides its two matrices."""
        of_conv = sum(self.filtered) * (self.width + self.conv_bias)
        of_norm = self.inner if self.norm is not None else 0
        biases = sum(self.projected) * self.in_bias + hidden_size * self.out_bias
        return of_conv + of_norm + biases + 3 * self.num_heads
