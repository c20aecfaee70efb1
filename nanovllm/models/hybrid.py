"""Models with gated delta nets in most layers, and attention in the others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.layers.delta_sizes import DeltaNames, DeltaSizes
from nanovllm.models.config import ModelConfig
from nanovllm.models.fields import MAX_LAYERS, Fields
from nanovllm.models.layer_kinds import LINEAR, checked_kinds
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.gated_delta_net import GatedDeltaNet
    from nanovllm.layers.layer import Build

KINDS = FULL, LINEAR
MIXER = "linear_attn"  # what files call the gated delta net of a layer


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """The layers in `linear_layers` have a gated delta net instead of attention."""

    delta_names: ClassVar[DeltaNames]

    delta: DeltaSizes
    linear_layers: frozenset[int]

    def layer_shape(self, index: int) -> LayerShape:
        shape, delta, hidden = super().layer_shape(index), self.delta, self.hidden_size
        if index not in self.linear_layers:
            return shape
        rows = {
            name: sum(delta.rows(kinds)) for name, kinds in self.delta_names.projections.items()
        }
        matrices = [MatrixShape(f"{MIXER}.{name}", size, hidden) for name, size in rows.items()]
        matrices.append(MatrixShape(f"{MIXER}.{self.delta_names.out_proj}", hidden, delta.values))
        others = [each for each in shape.matrices if not each.name.startswith("self_attn.")]
        return replace(
            shape, cache=delta.state, matrices=(*matrices, *others),
            num_others=2 * hidden + delta.num_others, split={**shape.split, **delta.split},
        )  # fmt: skip


def hybrid_fields(fields: Fields, interval: int) -> dict[str, Any]:
    """The fields of a `HybridConfig` that are not those of every decoder.

    Without `layer_types`, every layer whose number `interval` divides has attention, from 1.
    """
    return dict(delta=_sizes(fields), linear_layers=_linear_layers(fields, interval))


def _sizes(fields: Fields) -> DeltaSizes:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    key_heads, heads, key_dim, value_dim = (fields.size(f"linear_{name}") for name in names)
    if heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads={heads} is not a multiple of linear_num_key_heads={key_heads}"
        )
    name = "linear_conv_kernel_dim"
    return DeltaSizes(key_heads, heads, key_dim, value_dim, check_int(name, fields[name], 2))


def _linear_layers(fields: Fields, interval: int) -> frozenset[int]:
    """The layers without attention."""
    num_layers, kinds = fields.size("num_hidden_layers", MAX_LAYERS), fields["layer_types"]
    if kinds is None:
        return layers_by_interval(num_layers, interval)
    checked = checked_kinds("layer_types", kinds, KINDS, num_layers)
    return frozenset(index for index, kind in enumerate(checked) if kind == LINEAR)


def layers_by_interval(num_layers: int, interval: int) -> frozenset[int]:
    """The layers without attention, if each layer has it whose number `interval` divides."""
    return frozenset(index for index in range(num_layers) if (index + 1) % interval)


def delta_net(
    config: HybridConfig, make: "Build", eps: float | None = None, most: float = 1.0
) -> "GatedDeltaNet":
    """The gated delta net of a layer."""
    from nanovllm.layers.gated_delta_net import GatedDeltaNet

    eps = config.rms_norm_eps if eps is None else eps
    inside = make.inside(MIXER)
    return GatedDeltaNet(
        inside, config.hidden_size, config.delta, config.delta_names, eps, most=most
    )
