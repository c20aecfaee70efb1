"""The size of a model, by its shape: parameters, their bytes, and the bytes that a step reads.

Plain arithmetic over the shapes of its layers: it knows no tensors.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.formats.names import EMBEDDING, HEAD
from nanovllm.formats.quantization import NOT_QUANTIZED, Quantization
from nanovllm.models.config import ModelConfig
from nanovllm.models.shapes import ExpertCount, LayerShape

if TYPE_CHECKING:
    from nanovllm.formats.scheme import Scheme

Counted = Callable[[ExpertCount], float]  # how many of a layer's experts count


@dataclass(frozen=True)
class WeightBytes:
    """How much memory weights take as they are stored on the device, with scales and zero points.

    Plain weights have `itemsize` bytes; others what the model's quantization makes of them.
    """

    itemsize: int
    quantization: Quantization | None = None

    def scheme(self, name: str) -> "Scheme | None":
        """How the linear layer `name` of the checkpoint is quantized; None: it is plain."""
        return (self.quantization or NOT_QUANTIZED).scheme(name)

    def of(self, name: str, size_out: int, size_in: int) -> int:
        """Bytes of the linear layer `name` of the checkpoint, with a weight [out, in]."""
        scheme, num_weights = self.scheme(name), size_out * size_in
        if scheme is None:
            return num_weights * self.itemsize
        return scheme.num_bytes(num_weights, size_in)


def per_token(experts: ExpertCount) -> float:
    """The number of experts that a token uses."""
    return experts.per_token


def every(experts: ExpertCount) -> float:
    """The number of all experts."""
    return experts.total


def touched(rows: int) -> Counted:
    """The average number that `rows` tokens use, if all are equally likely."""

    def count(experts: ExpertCount) -> float:
        return experts.total * (1 - (1 - experts.per_token / experts.total) ** rows)

    return count


def layer_params(layer: LayerShape, counted: Counted = per_token) -> float:
    """Weights of a layer's linear parts; each is one multiply-add per token."""
    return sum(
        matrix.size_out * matrix.size_in * _copies(layer, matrix.is_experts, counted)
        for matrix in layer.matrices
    )


def _copies(layer: LayerShape, is_experts: bool, counted: Counted) -> float:
    return counted(layer.experts) if is_experts and layer.experts else 1


def decoder_params(config: ModelConfig, counted: Counted = per_token) -> float:
    """The sum of `layer_params` over all layers."""
    return sum(layer_params(layer, counted) for layer in config.layers)


def decoder_bytes(config: ModelConfig, sizes: WeightBytes, counted: Counted = per_token) -> float:
    """The bytes of the weights that `decoder_params` counts."""
    return sum(
        sizes.of(f"model.layers.{index}.{matrix.name}", matrix.size_out, matrix.size_in)
        * _copies(layer, matrix.is_experts, counted)
        for index, layer in enumerate(config.layers)
        for matrix in layer.matrices
    )


def head_params(config: ModelConfig) -> int:
    """Weights of the projection to the vocabulary."""
    return config.vocab_size * config.hidden_size


def num_params(config: ModelConfig) -> int:
    """All parameters of the model; a table shared by embedding and head is counted once."""
    tables = 1 if config.tie_word_embeddings else 2
    last_norm, small = config.hidden_size, sum(layer.num_others for layer in config.layers)
    others = last_norm + small + config.num_outside
    return int(decoder_params(config, every)) + tables * head_params(config) + others


def main_scheme(config: ModelConfig) -> "Scheme | None":
    """The scheme of most of the decoder's weights; None if they are plain."""
    counts: Counter[Scheme | None] = Counter()
    quantization = config.quantization or NOT_QUANTIZED
    for index, layer in enumerate(config.layers):
        for name, size_out, size_in, is_experts in layer.matrices:
            scheme = quantization.scheme(f"model.layers.{index}.{name}")
            counts[scheme] += size_out * size_in * int(_copies(layer, is_experts, every))
    return counts.most_common(1)[0][0]


def head_bytes(config: ModelConfig, sizes: WeightBytes) -> int:
    """The bytes of the projection to the vocabulary."""
    return sizes.of(HEAD, config.vocab_size, config.hidden_size)


def step_weight_bytes(config: ModelConfig, sizes: WeightBytes, rows: int) -> float:
    """Bytes of weights that a step of `rows` tokens reads, including the head."""
    return decoder_bytes(config, sizes, touched(rows)) + head_bytes(config, sizes)


def model_bytes(config: ModelConfig, sizes: WeightBytes) -> int:
    """The bytes of all parameters.

    Embedding and head share a table, except where only the head is quantized.
    """
    linear = decoder_params(config, every) + head_params(config)
    others = num_params(config) - int(linear)
    of_linear = decoder_bytes(config, sizes, every) + head_bytes(config, sizes)
    table = (sizes.quantization or NOT_QUANTIZED).scheme_of_table(EMBEDDING)
    if table is None:
        if config.tie_word_embeddings and sizes.scheme(HEAD) is not None:
            others += head_params(config)
    elif not config.tie_word_embeddings:
        others -= head_params(config)
        of_linear += table.num_bytes(head_params(config), config.hidden_size)
    return int(of_linear) + others * sizes.itemsize
