"""Latent: the cache of latent attention. No PyTorch here: configs import it."""

from dataclasses import dataclass, replace

from nanovllm.layers.cache_spec import Heads, TokenCache


@dataclass(frozen=True)
class Latent(TokenCache):
    """One row of `width` numbers for each token, which all heads of queries read.

    A row is the key of all heads; its first `value_width` columns are their value, by default all.
    """

    num_heads: int
    width: int
    window: int | None = None
    value_width: int | None = None

    num_tensors = 1

    def __post_init__(self) -> None:
        if self.value_width is None:
            object.__setattr__(self, "value_width", self.width)

    @property
    def heads(self) -> Heads:
        return self.num_heads, 1, self.width

    def part(self, num_ranks: int) -> "Latent":
        """Every rank keeps whole rows."""
        return replace(self, num_heads=self.num_heads // num_ranks)
