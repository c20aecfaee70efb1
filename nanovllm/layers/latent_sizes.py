"""LatentSizes: the sizes of latent attention. No PyTorch here: configs import it."""

from dataclasses import dataclass

from nanovllm.layers.latent import Latent


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """The sizes of DeepSeek's latent attention, of all ranks together, and what varies in it.

    A token's row has `rank` numbers and `rotated` ones. From the first, `kv_b_proj` makes `plain`
    numbers of each head's key and `value` of its value; the others are rotated and belong to the
    keys of all heads. With a `query_rank`, queries are made of so many normalized numbers.
    `has_bias` is of the layers from and to hidden states, except of plain queries. The rope rotates
    neighbours as pairs if it is `interleaved`. Scores are multiplied by `scale`.
    """

    num_heads: int
    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    has_bias: bool
    interleaved: bool
    scale: float

    @property
    def cache(self) -> Latent:
        """What a layer keeps."""
        return Latent(self.num_heads, self.rank + self.rotated, value_width=self.rank)

    @property
    def query_size(self) -> int:
        """Numbers of all heads' queries."""
        return self.num_heads * (self.plain + self.rotated)

    @property
    def expanded_size(self) -> int:
        """Numbers of all heads' keys, without those that are rotated, and values."""
        return self.num_heads * (self.plain + self.value)

    def num_others(self, hidden_size: int) -> int:
        """The parameters of a layer's norms and biases."""
        query_rank = self.query_rank or 0
        biases = query_rank + self.rank + self.rotated + hidden_size
        return query_rank + self.rank + biases * self.has_bias
