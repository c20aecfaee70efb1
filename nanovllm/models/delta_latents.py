"""Models with channel delta nets in most layers, and latent attention in the others."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.layers.channel_delta_sizes import CONVOLUTIONS, ChannelDeltaSizes
from nanovllm.models.experts import layers_after_dense
from nanovllm.models.fields import Fields
from nanovllm.models.latents import SparseLatentConfig
from nanovllm.models.layer_kinds import LINEAR, checked_kinds
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.sparse_kinds import sparse_layers
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.block import Block
    from nanovllm.layers.latent_attention import LatentAttention
    from nanovllm.layers.layer import Build

KINDS = FULL, LINEAR
FIRST = "first_k_dense_replace"
DENSE_PART = re.compile(r"\.mlp\.(gate|up|down|gate_up)_proj$")
# For messages: the families of DeepSeek call the number of experts n_routed_experts.
SPELT_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts"), "n_routed_experts")
MIXER = "self_attn"  # what files call both kinds of mixers


@dataclass(frozen=True, kw_only=True)
class DeltaLatentConfig(SparseLatentConfig):
    """The layers in `linear_layers` have a channel delta net instead of latent attention."""

    delta: ChannelDeltaSizes
    linear_layers: frozenset[int]

    def layer_shape(self, index: int) -> LayerShape:
        shape, delta, hidden = super().layer_shape(index), self.delta, self.hidden_size
        if index not in self.linear_layers:
            return shape
        others = (each for each in shape.matrices if not each.name.startswith(f"{MIXER}."))
        number = shape.num_others - self.latent.num_others(hidden) + delta.num_others
        return replace(
            shape, cache=delta.state, matrices=(*delta_matrices(delta, hidden), *others),
            num_others=number, split={**shape.split, "linear_num_heads": delta.heads},
        )  # fmt: skip


def delta_matrices(delta: ChannelDeltaSizes, hidden_size: int) -> tuple[MatrixShape, ...]:
    """The matrices of a channel delta net."""
    sizes = {name: (rows, hidden_size) for name, rows in delta.projections.items()}
    if delta.low_rank:
        sizes |= dict.fromkeys(("f_b_proj", "g_b_proj"), (delta.size, delta.dim))
    sizes["o_proj"] = hidden_size, delta.size
    return tuple(MatrixShape(f"{MIXER}.{name}", *shape) for name, shape in sizes.items())


class DeltaLatentNames(Names):
    """Dense parts are `mlp` also in files that call experts otherwise.

    In adapters, which have transformers' names, a module `forget_gate` has some projections.
    """

    def ours(self, name: str) -> str:
        return super().ours(name.replace(".forget_gate.", "."))

    def theirs(self, name: str) -> str:
        return name if DENSE_PART.search(name) else super().theirs(name)


def fused_names(projections: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The parts of fused layers in files."""
    return {**FUSED, "in_proj": projections, "conv1d": CONVOLUTIONS}


def linear_layers(
    file: Mapping[str, Any], number: int, kinds: list[str], other: str
) -> frozenset[int]:
    """The layers without attention, by `layer_types`, or without it by `kinds`.

    If the file has the field `other`, which says `kinds`, both must agree.
    """
    given = file.get("layer_types")
    checked = kinds if given is None else [*checked_kinds("layer_types", given, KINDS, number)]
    if file.get(other) is not None and checked != kinds:
        raise ValueError(f"{other}={shorten(file[other])} contradicts layer_types={shorten(given)}")
    return frozenset(index for index, kind in enumerate(checked) if kind == LINEAR)


def with_experts(fields: Fields) -> Fields:
    """The fields with the number of experts by the name that DeepSeek's families read."""
    fields["n_routed_experts"] = fields["num_local_experts"]
    return fields


def layers_with_experts(fields: Fields, file: Mapping[str, Any]) -> frozenset[int]:
    """By `mlp_layer_types`, or without it all after the first `first_k_dense_replace`."""
    by_first = layers_after_dense(fields)
    if fields["mlp_layer_types"] is None:
        return by_first
    given = {**fields, FIRST: file.get(FIRST)}
    return sparse_layers(given, fields["num_hidden_layers"], FIRST, by_first)


def mixed_block(
    config: DeltaLatentConfig, kind: "type[LatentAttention] | None" = None
) -> "Callable[[int, Build], Block]":
    """Makes the block of each layer, with attention of the class `kind` in some."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.channel_delta_net import ChannelDeltaNet
    from nanovllm.layers.latent_attention import LatentAttention
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models import parts
    from nanovllm.models.latent_parts import feed_forward

    def block(index: int, make: "Build") -> Block:
        inside, hidden = make.inside(MIXER), config.hidden_size
        mixer: Mixer
        if index in config.linear_layers:
            mixer = ChannelDeltaNet(inside, hidden, config.delta, config.rms_norm_eps)
        else:
            mixer = (kind or LatentAttention)(inside, hidden, config.latent)
        part = feed_forward(config, index, make.inside("mlp"))
        return Block(make, parts.pre_norms(config), mixer, part)

    return block
