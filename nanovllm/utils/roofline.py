"""Roofline: the bytes and FLOPs of a workload, and the least time that a machine takes for them.

Plain arithmetic over a model's shape and the lengths of requests: it knows no tensors and measures
nothing. All requests run at once. Counted is what no engine gets around:

- prefill: each prompt token through the decoder's linear layers and causal attention;
- decode: each step reads the weights once, and every running sequence's KV once.

The head is counted for rows that are sampled. Norms, activations, embedding rows, logits and the
host are not counted: they are small, or can be hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class Machine:
    """The two rates that bound a model's speed."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Floor:
    """The least time of a workload on a machine, by what takes it."""

    prefill_seconds: float
    decode_gemm_seconds: float
    decode_kv_seconds: float

    @property
    def seconds(self) -> float:
        """The parts follow one another: a layer's attention waits for its projections."""
        return self.prefill_seconds + self.decode_gemm_seconds + self.decode_kv_seconds


def decoder_params(config: ModelConfig) -> int:
    """Weights of the decoder's linear layers: each is one multiply-add per token."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (heads + 2 * kv_heads) + heads * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp)


def head_params(config: ModelConfig) -> int:
    """Weights of the projection to the vocabulary."""
    return config.vocab_size * config.hidden_size


def num_params(config: ModelConfig) -> int:
    """All parameters of the model; a table that embedding and head share counts once."""
    tables = 1 if config.tie_word_embeddings else 2
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    biases = (heads + config.hidden_size) * config.attention_bias
    norms = 2 * config.hidden_size + 2 * config.head_dim
    small = config.num_hidden_layers * (norms + biases) + config.hidden_size
    return decoder_params(config) + tables * head_params(config) + small


def step_weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a step reads, its head included."""
    return (decoder_params(config) + head_params(config)) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes that one token takes in the KV cache, all layers together."""
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    )  # fmt: skip


def prefill_flops(config: ModelConfig, input_lens: Sequence[int]) -> int:
    """FLOPs of prefilling prompts of these lengths; each samples from its last row alone."""
    pairs = sum(n * (n + 1) // 2 for n in input_lens)  # a query and a key that it attends to
    heads = config.num_attention_heads * config.head_dim
    attention = 4 * config.num_hidden_layers * heads * pairs
    linear = 2 * decoder_params(config) * sum(input_lens)
    return attention + linear + 2 * head_params(config) * len(input_lens)


def decode_batches(output_lens: Sequence[int]) -> list[int]:
    """How many sequences each decode step runs; the first token of each comes from its prefill."""
    return [sum(n > step for n in output_lens) for step in range(1, max(output_lens))]


def decode_kv_tokens(input_lens: Sequence[int], output_lens: Sequence[int]) -> int:
    """How often decode reads some token's KV: step j of a request attends to input + j tokens."""
    return sum(
        num_in * (num_out - 1) + num_out * (num_out - 1) // 2
        for num_in, num_out in zip(input_lens, output_lens, strict=True)
    )


def floor(
    config: ModelConfig,
    itemsize: int,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    machine: Machine,
) -> Floor:
    """The least time for requests of these lengths, with weights and KV of `itemsize` bytes."""
    weight_seconds = step_weight_bytes(config, itemsize) / machine.bytes_per_second
    row_seconds = 2 * (decoder_params(config) + head_params(config)) / machine.flops_per_second
    kv_bytes = decode_kv_tokens(input_lens, output_lens) * kv_bytes_per_token(config, itemsize)
    return Floor(
        prefill_seconds=max(
            weight_seconds, prefill_flops(config, input_lens) / machine.flops_per_second
        ),
        decode_gemm_seconds=sum(
            max(weight_seconds, rows * row_seconds) for rows in decode_batches(output_lens)
        ),
        decode_kv_seconds=kv_bytes / machine.bytes_per_second,
    )
