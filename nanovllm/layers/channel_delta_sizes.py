"""The sizes of a channel delta net, which configs know before it is built. No PyTorch here."""

from dataclasses import dataclass, replace

from nanovllm.layers.cache_spec import State, StateTensor

# The projections of hidden states, as files call them: how much channels forget, and the gates of
# outputs, are made directly or of fewer numbers.
DIRECT = ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "b_proj")
LOW_RANK = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


@dataclass(frozen=True, kw_only=True)
class ChannelDeltaSizes:
    """Heads with memories [dim, dim] of values by keys. Convolutions read `width` tokens.

    With `low_rank`, a token's `dim` numbers make what all channels forget, and others make the
    gates of outputs; else hidden states do. The logarithm of what remains of a channel is at least
    `lowest`. Files have a head's rate in a tensor of the shape `rates_shape`.
    """

    heads: int
    dim: int
    width: int
    low_rank: bool
    rates_shape: tuple[int, ...]
    lowest: float | None = None

    @property
    def size(self) -> int:
        """Elements of all heads' keys, and as many of queries, of values and of gates."""
        return self.heads * self.dim

    @property
    def projections(self) -> dict[str, int]:
        """The rows of each projection of hidden states."""
        size, inner = self.size, self.dim if self.low_rank else self.size
        sizes = (size, size, size, inner, inner, self.heads)
        return dict(zip(LOW_RANK if self.low_rank else DIRECT, sizes, strict=True))

    @property
    def num_others(self) -> int:
        """Parameters of the convolution, the rates and the norm."""
        return 3 * self.size * self.width + self.size + self.heads + self.dim

    @property
    def state(self) -> State:
        """What the mixer keeps: the last inputs of the convolution, and the memories."""
        memory = StateTensor((self.heads, self.dim, self.dim), in_float32=True)
        return State((StateTensor((self.width - 1, 3 * self.size)), memory))

    def part(self, num_ranks: int) -> "ChannelDeltaSizes":
        """The sizes on each of `num_ranks` ranks."""
        return replace(self, heads=self.heads // num_ranks)
