"""How large a model is, by its shape: parameters, their bytes, and what a step reads of them.

Plain arithmetic: it knows no tensors.
"""

from collections import Counter
from typing import NamedTuple

from nanovllm.layers.weights.scheme import Scheme
from nanovllm.models.config import ModelConfig
from nanovllm.models.quantization.rules import HEAD
from nanovllm.models.weight_bytes import WeightBytes


class Matrix(NamedTuple):
    """A linear layer's weight [out, in], by its name in the checkpoint's decoder layer."""

    name: str
    size_out: int
    size_in: int
    is_experts: bool = False  # every expert has one


def layer_matrices(config: ModelConfig, index: int) -> list[Matrix]:
    """The weights of a layer's linear parts."""
    hidden, experts = config.hidden_size, config.experts
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    matrices = [
        Matrix("self_attn.q_proj", heads, hidden),
        Matrix("self_attn.k_proj", kv_heads, hidden),
        Matrix("self_attn.v_proj", kv_heads, hidden),
        Matrix("self_attn.o_proj", hidden, heads),
    ]
    if experts is None or index not in experts.layers:
        above, inner = "mlp", config.intermediate_size
    else:
        above, inner = "mlp.experts.0", experts.intermediate_size
        matrices.append(Matrix("mlp.gate", experts.num_experts, hidden))
    is_experts = above != "mlp"
    return [
        *matrices,
        Matrix(f"{above}.gate_proj", inner, hidden, is_experts),
        Matrix(f"{above}.up_proj", inner, hidden, is_experts),
        Matrix(f"{above}.down_proj", hidden, inner, is_experts),
    ]


def layer_params(config: ModelConfig, index: int, num_experts: float | None = None) -> float:
    """Weights of a layer's linear parts; each is one multiply-add per token.

    `num_experts` experts are counted, by default as many as a token uses.
    """
    counted = _counted(config, num_experts)
    return sum(
        matrix.size_out * matrix.size_in * (counted if matrix.is_experts else 1)
        for matrix in layer_matrices(config, index)
    )


def layer_bytes(
    config: ModelConfig, index: int, sizes: WeightBytes, num_experts: float | None = None
) -> float:
    """The bytes of the weights that `layer_params` counts."""
    counted = _counted(config, num_experts)
    return sum(
        sizes.of(f"model.layers.{index}.{matrix.name}", matrix.size_out, matrix.size_in)
        * (counted if matrix.is_experts else 1)
        for matrix in layer_matrices(config, index)
    )


def _counted(config: ModelConfig, num_experts: float | None) -> float:
    if num_experts is None:
        return config.experts.per_token if config.experts else 0
    return num_experts


def decoder_params(config: ModelConfig, num_experts: float | None = None) -> float:
    """The sum of `layer_params` over all layers."""
    return sum(layer_params(config, i, num_experts) for i in range(config.num_hidden_layers))


def touched_experts(config: ModelConfig, rows: int) -> float:
    """The average number of a layer's experts that `rows` tokens use, if all are equally likely."""
    if config.experts is None:
        return 0
    num_experts, per_token = config.experts.num_experts, config.experts.per_token
    return num_experts * (1 - (1 - per_token / num_experts) ** rows)


def head_params(config: ModelConfig) -> int:
    """Weights of the projection to the vocabulary."""
    return config.vocab_size * config.hidden_size


def num_params(config: ModelConfig) -> int:
    """All parameters of the model; a table shared by embedding and head is counted once."""
    tables = 1 if config.tie_word_embeddings else 2
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    biases = heads * config.qkv_bias + config.hidden_size * config.o_bias
    biases += (2 * config.intermediate_size + config.hidden_size) * config.mlp_bias
    norms = 2 * config.hidden_size + 2 * config.head_dim * config.qk_norm
    small = config.num_hidden_layers * (norms + biases) + config.hidden_size
    all_experts = config.experts.num_experts if config.experts else None
    return int(decoder_params(config, all_experts)) + tables * head_params(config) + small


def decoder_bytes(
    config: ModelConfig, sizes: WeightBytes, num_experts: float | None = None
) -> float:
    """The sum of `layer_bytes` over all layers."""
    layers = range(config.num_hidden_layers)
    return sum(layer_bytes(config, i, sizes, num_experts) for i in layers)


def main_scheme(config: ModelConfig) -> Scheme | None:
    """How most of the decoder's weights are quantized; None if they are plain."""
    counts: Counter[Scheme | None] = Counter()
    for index in range(config.num_hidden_layers):
        for name, size_out, size_in, is_experts in layer_matrices(config, index):
            copies = config.experts.num_experts if config.experts and is_experts else 1
            scheme = config.quantization.scheme(f"model.layers.{index}.{name}")
            counts[scheme] += size_out * size_in * copies
    return counts.most_common(1)[0][0]


def head_bytes(config: ModelConfig, sizes: WeightBytes) -> int:
    """The bytes of the projection to the vocabulary."""
    return sizes.of(HEAD, config.vocab_size, config.hidden_size)


def step_weight_bytes(config: ModelConfig, sizes: WeightBytes, rows: int) -> float:
    """Bytes of weights that a step of `rows` tokens reads, including the head."""
    touched = touched_experts(config, rows)
    return decoder_bytes(config, sizes, touched) + head_bytes(config, sizes)


def model_bytes(config: ModelConfig, sizes: WeightBytes) -> int:
    """The bytes of all parameters.

    Embedding and head share a table, except where the head is quantized.
    """
    all_experts = config.experts.num_experts if config.experts else None
    linear = decoder_params(config, all_experts) + head_params(config)
    others = num_params(config) - int(linear)
    if config.tie_word_embeddings and sizes.quantization.scheme(HEAD) is not None:
        others += head_params(config)
    of_linear = decoder_bytes(config, sizes, all_experts) + head_bytes(config, sizes)
    return int(of_linear) + others * sizes.itemsize
