"""LayerShape: the matrices and the cache of a layer, which the engine knows before it is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.layers.cache_spec import CacheSpec, KeysAndValues


class MatrixShape(NamedTuple):
    """A linear layer's weight [out, in], by its name in the checkpoint's decoder layer."""

    name: str
    size_out: int
    size_in: int
    is_experts: bool = False  # every expert has one


class ExpertCount(NamedTuple):
    """The experts of a layer, and how many of them each token uses."""

    total: int
    per_token: int


@dataclass(frozen=True)
class LayerShape:
    """A layer of the whole model, not of one rank.

    `split` has the sizes that the ranks divide, by their names in the config. `split_experts` has
    the sizes of experts, which the ranks do not divide if they have whole experts. `num_others`
    counts the parameters of norms and biases. `needs` says what attention must compute besides a
    softmax of scaled scores: "soft_cap", a cap on scores; "sinks", a term of its own for each head.
    """

    cache: CacheSpec
    matrices: tuple[MatrixShape, ...]
    num_others: int
    split: Mapping[str, int] = field(default_factory=dict)
    split_experts: Mapping[str, int] = field(default_factory=dict)
    experts: ExpertCount | None = None
    needs: frozenset[str] = frozenset()


def attention_matrices(
    hidden_size: int, heads: KeysAndValues, above: str = "self_attn"
) -> tuple[MatrixShape, ...]:
    """The matrices of the projections of self-attention."""
    size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    return (
        MatrixShape(f"{above}.q_proj", size, hidden_size),
        MatrixShape(f"{above}.k_proj", kv_size, hidden_size),
        MatrixShape(f"{above}.v_proj", kv_size, hidden_size),
        MatrixShape(f"{above}.o_proj", hidden_size, size),
    )


def gated_matrices(
    hidden_size: int, intermediate_size: int, above: str = "mlp", is_experts: bool = False
) -> tuple[MatrixShape, ...]:
    """The matrices of a gated feed-forward part, or of each expert."""
    return (
        MatrixShape(f"{above}.gate_proj", intermediate_size, hidden_size, is_experts),
        MatrixShape(f"{above}.up_proj", intermediate_size, hidden_size, is_experts),
        MatrixShape(f"{above}.down_proj", hidden_size, intermediate_size, is_experts),
    )
