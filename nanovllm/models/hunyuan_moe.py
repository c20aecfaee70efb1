"""HunYuan-A13B: the attention of HunYuan's dense models, and experts in all layers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models import hunyuan_dense
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    all_layers,
    experts_per_token,
    number_of_experts,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **hunyuan_dense.DEFAULTS, "num_experts": 1, "moe_topk": 1,
}  # fmt: skip
INNER = "intermediate_size"
SPELLING = {"moe_topk": "num_experts_per_tok"}
OF_LAYERS = ("moe_topk", "num_experts_per_tok", "num_experts")  # may be lists
# Fields of the first models of the family, which transformers does not read.
UNREAD: Mapping[str, Any] = {
    "use_cla": False, "moe_layer_num_skipped": 0, "num_shared_expert": 1, "use_mixed_mlp_moe": True,
    "use_qk_norm": True, "norm_topk_prob": True,
}  # fmt: skip
PIECES = {**hunyuan_dense.NAMES.pieces, "mlp.gate.wg": "mlp.gate"}


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> SparseConfig:
    """All experts and the shared layer have the intermediate size. Biases as in dense models."""
    equal = {name: _of_all_layers(name, file[name]) for name in OF_LAYERS if name in file}
    _check_unread(file)
    spelt = respelt({**file, **equal}, SPELLING, both=True)
    fields = Fields(hunyuan_dense.without_alpha(spelt), respelt(DEFAULTS, SPELLING), NO_WINDOW)
    check_activation(fields)
    bias, num_experts, inner = (
        fields.flag("attention_bias"), number_of_experts(fields), fields.size(INNER),
    )  # fmt: skip
    routing = Routing(per_token=experts_per_token(fields, num_experts), normalized=True)
    shared = SharedExpert(inner, "shared_mlp", size_name=INNER)
    layers = all_layers(fields)
    return SparseConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=ExpertsConfig(num_experts, inner, routing, layers, shared, size_name=INNER),
    )


def _of_all_layers(name: str, value: Any) -> Any:
    """The value that a list has for every layer."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise ValueError(f"{name} must be the same for all layers, got {shorten(value)}")
    return value[0]


def _check_unread(file: Mapping[str, Any]) -> None:
    needed = {**UNREAD, "moe_intermediate_size": file.get(INNER, DEFAULTS[INNER])}
    for name, only in needed.items():
        if file.get(name) is not None and _of_all_layers(name, file[name]) != only:
            raise ValueError(f"{name} must be {only}, got {shorten(file[name])}")


def build(config: SparseConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.late_head_norms import LateHeadNorms
    from nanovllm.models import parts

    def attention(index: int, make: "Build") -> "Mixer":
        return parts.attention(config, index, make, LateHeadNorms)

    return sparse_model(config, make, attention)


FAMILY = Family(read, build, Names(pieces=PIECES))
