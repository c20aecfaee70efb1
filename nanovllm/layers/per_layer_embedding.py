"""The block of models with per-layer embeddings: a second embedding, with a part for each block.

P numbers of each part. `models/per_layer_decoder.py` computes the parts.
"""

import torch

from nanovllm.layers.activations import PlainActivation
from nanovllm.layers.block import Block, Norms
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.mixer import Mixer, Ropes
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.sizes import PerLayer


class PerLayerBlock(Block):
    """A block that also reads its part of the second embedding; without `per_layer` it has none.

    `forward` takes the hidden states [T, hidden] and the part [T, P], and returns hidden states.
    """

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        eps: float,
        norms: Norms,
        mixer: Mixer,
        feed_forward: FeedForward,
        per_layer: PerLayer | None,
    ) -> None:
        super().__init__(make, norms, mixer, feed_forward)
        if per_layer is not None:
            of, size = make.formats.of, per_layer.size
            gate, projection = "per_layer_input_gate", "per_layer_projection"
            self.per_layer_input_gate = ReplicatedLinear(hidden_size, size, False, of(gate))
            self.per_layer_projection = ReplicatedLinear(size, hidden_size, False, of(projection))
            self.per_layer_activation = PlainActivation("gelu_pytorch_tanh")
            self.post_per_layer_input_norm = RMSNorm(hidden_size, eps)

    def of_part(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """What the block's part of the second embedding adds, gated by x [T, hidden]."""
        gated = self.per_layer_activation(self.per_layer_input_gate(x)) * part
        normed: torch.Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return normed

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        part: torch.Tensor | None,
        ropes: Ropes,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The hidden states after the block, only of the tokens `rows` if given."""
        raise NotImplementedError
