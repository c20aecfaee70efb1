"""BiasedHead: a projection to the vocabulary with a bias."""

from typing import Any

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import BIAS


class BiasedHead(ParallelLMHead):
    """Each rank adds the biases of its tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bias = self.rank_part.new(BIAS)
        self.bias.data.zero_()
