"""SparseConfig: a model that has experts in all layers, or in some. No PyTorch here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.kernels.operands.routing import ExpertGroups, Routing
from nanovllm.models.config import ModelConfig
from nanovllm.models.fields import Fields, ids
from nanovllm.models.shapes import (
    ExpertCount,
    LayerShape,
    MatrixShape,
    attention_matrices,
    gated_matrices,
)
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM


@dataclass(frozen=True)
class SharedExpert:
    """The layer that all tokens use, by its name in checkpoints; its size by that in the config."""

    intermediate_size: int
    name: str = "shared_experts"
    is_gated: bool = False  # by the layer with this name and `_gate` at the end
    size_name: str = "shared intermediate size"


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of the decoder layers `layers`, and how a token's experts are chosen.

    `size_name` is what the config calls their intermediate size.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    layers: frozenset[int]
    shared: SharedExpert | None = None
    size_name: str = "moe_intermediate_size"


@dataclass(frozen=True, kw_only=True)
class SparseConfig(ModelConfig):
    """The shape of a decoder with experts instead of the gated part in some layers."""

    experts: ExpertsConfig

    def layer_shape(self, index: int) -> LayerShape:
        dense, hidden, experts = super().layer_shape(index), self.hidden_size, self.experts
        if index not in experts.layers:
            return dense
        inner, shared = experts.intermediate_size, experts.shared
        matrices = [
            *attention_matrices(hidden, self.heads(index)),
            MatrixShape("mlp.gate", experts.num_experts, hidden),
            *gated_matrices(hidden, inner, "mlp.experts.0", is_experts=True),
        ]
        if shared is not None:
            above = f"mlp.{shared.name}"
            matrices += gated_matrices(hidden, shared.intermediate_size, above)
            matrices += [MatrixShape(f"{above}_gate", 1, hidden)] if shared.is_gated else []
        biases = experts.num_experts if experts.routing.has_bias else 0
        return replace(
            dense, matrices=tuple(matrices), num_others=dense.num_others + biases,
            split={shared.size_name: shared.intermediate_size} if shared else {},
            split_experts={experts.size_name: inner},
            experts=ExpertCount(experts.num_experts, experts.routing.per_token),
        )  # fmt: skip

    @property
    def sizes(self) -> str:
        experts, shared = self.experts, self.experts.shared
        inner = f"{experts.size_name}={experts.intermediate_size}"
        outer = f", {shared.size_name}={shared.intermediate_size}" if shared else ""
        return f"{super().sizes}, num_experts={experts.num_experts}, {inner}{outer}"


def sparse_mlp(config: SparseConfig, make: "Build") -> "FeedForward":
    """The experts of a layer."""
    from nanovllm.layers.sparse_mlp import SparseMLP

    experts = config.experts
    sizes = config.hidden_size, experts.intermediate_size, experts.num_experts
    if (shared := experts.shared) is None:
        return SparseMLP(make, *sizes, experts.routing)
    from nanovllm.layers.shared_experts import SharedSparseMLP

    return SharedSparseMLP(
        make, *sizes, experts.routing,
        shared_size=shared.intermediate_size, name=shared.name, is_gated=shared.is_gated,
    )  # fmt: skip


def sparse_model(
    config: SparseConfig,
    make: "Build",
    attention: "Callable[[int, Build], Mixer] | None" = None,
) -> "CausalLM":
    """The form of Llama, with experts instead of the gated layer where the config says so.

    `attention` makes a layer's attention by its index, if it is not the usual one.
    """
    from nanovllm.layers.block import Block
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        is_sparse, inside = index in config.experts.layers, make.inside("mlp")
        above = make.inside("self_attn")
        mixer = attention(index, above) if attention else parts.attention(config, index, above)
        feed_forward = sparse_mlp(config, inside) if is_sparse else parts.mlp(config, inside)
        return Block(make, parts.pre_norms(config), mixer, feed_forward)

    return parts.causal_lm(config, make, block)


def layers_by_step(fields: Fields) -> frozenset[int]:
    """The layers with experts: every `decoder_sparse_step`th, except `mlp_only_layers`."""
    step, dense = fields.size("decoder_sparse_step"), fields["mlp_only_layers"]
    if dense is not None and not isinstance(dense, list):
        raise TypeError(f"mlp_only_layers must be a list of numbers, got {shorten(dense)}")
    layers = range(step - 1, fields["num_hidden_layers"], step)
    return frozenset(layers) - ids("mlp_only_layers", dense)


def layers_after_dense(fields: Fields) -> frozenset[int]:
    """The layers with experts: all after the first `first_k_dense_replace`."""
    first = check_int("first_k_dense_replace", fields["first_k_dense_replace"], 0)
    return frozenset(range(first, fields["num_hidden_layers"]))


def all_layers(fields: Fields) -> frozenset[int]:
    """Every layer has experts."""
    return frozenset(range(fields.size("num_hidden_layers")))


def number_of_experts(fields: Fields) -> int:
    """The number of experts: `num_experts`, or as transformers 5 writes it, `num_local_experts`."""
    return fields.size("num_local_experts" if "num_local_experts" in fields else "num_experts")


def experts_per_token(fields: Fields, num_experts: int) -> int:
    """The number of experts of a token."""
    return check_int("num_experts_per_tok", fields["num_experts_per_tok"], 1, num_experts)


def expert_groups(fields: Fields, num_experts: int, best: int = 2) -> ExpertGroups | None:
    """The groups of experts by `n_group` and `topk_group`; None for one group, or null.

    A group is as good as the sum of its `best` largest scores.
    """
    if fields["n_group"] is None:
        return None
    number = fields.size("n_group", num_experts)
    chosen = fields.size("topk_group", number)
    size, per_token = num_experts // number, experts_per_token(fields, num_experts)
    if number == 1:
        return None
    if num_experts % number or size < best:
        raise ValueError(
            f"n_group={number} must divide the number of experts, {num_experts}, into groups of at"
            f" least {best}"
        )
    if chosen * size < per_token:
        raise ValueError(
            f"num_experts_per_tok={per_token}: topk_group={chosen} groups have {chosen * size}"
        )
    return None if chosen == number else ExpertGroups(number, chosen, best)
