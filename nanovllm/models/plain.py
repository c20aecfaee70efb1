"""PlainConfig: decoders with LayerNorm, a feed-forward part without a gate, or parallel blocks.

No PyTorch here: `plain_parts.py` builds the model.
"""

from dataclasses import dataclass, replace

from nanovllm.models.config import ModelConfig
from nanovllm.models.fields import Fields
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.utils.checks import check_choice

# The names in configs of activations without parameters.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "silu")


def activation(fields: Fields, name: str = "hidden_act") -> str:
    """The activation of feed-forward parts; an unsupported one is a ValueError."""
    return check_choice(name, fields[name], ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class PlainConfig(ModelConfig):
    """A decoder with blocks of these kinds.

    `activation` is that of feed-forward parts without a gate; None: silu gates them. `norm` is
    "rms", "layer", "layer without bias" or "layer plus one". With `parallel`, both parts of a block
    read its input: they share a norm, or the feed-forward part has `own_norm`. With `usual_order`,
    files store weights as the layers have them, though the family's own files do not.
    """

    activation: str | None
    norm: str = "layer"
    parallel: bool = False
    own_norm: bool = True
    usual_order: bool = False

    @property
    def num_norms(self) -> int:
        """Norms of hidden states in a block."""
        return 2 if self.own_norm or not self.parallel else 1

    def layer_shape(self, index: int) -> LayerShape:
        """With the norms and the feed-forward part that the model has."""
        usual, hidden, inner = super().layer_shape(index), self.hidden_size, self.intermediate_size
        of_norm = hidden if self.norm in ("rms", "layer without bias") else 2 * hidden
        others = usual.num_others - 2 * hidden + self.num_norms * of_norm
        if self.activation is None:
            return replace(usual, num_others=others)
        matrices = (
            *(matrix for matrix in usual.matrices if not matrix.name.startswith("mlp.")),
            MatrixShape("mlp.up_proj", inner, hidden),
            MatrixShape("mlp.down_proj", hidden, inner),
        )
        others -= inner * self.mlp_bias  # of a gate
        return replace(usual, matrices=matrices, num_others=others)
