"""ERNIE 4.5 with experts, text only: chosen by a softmax and a bias, with an interleaved rope."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.assumed import check_assumed
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    experts_per_token,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
    "tie_word_embeddings": True, "eos_token_id": 2,
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1, "moe_norm_min": 1e-12,
}  # fmt: skip
SPELLING = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
BIASES = "e_score_correction_bias"
# The module of the biases is inside of the router in transformers, and next to it in files.
NAMES = Names(
    pieces={
        f"mlp.gate.moe_statics.{BIASES}": f"mlp.gate.{BIASES}",
        f"mlp.moe_statics.{BIASES}": f"mlp.gate.{BIASES}",
    },
    skipped=("model.mtp_",),
)


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> SparseConfig:
    """The shares of a token's experts are divided by their sum, or by `moe_norm_min`."""
    fields = Fields(respelt(file, SPELLING, both=True), respelt(DEFAULTS, SPELLING), NO_WINDOW)
    check_activation(fields)
    check_assumed(file, {"use_bias": False})  # biases next to experts are not supported
    num_experts, inner = fields.size("num_experts"), fields.size("moe_intermediate_size")
    routing = Routing(
        per_token=experts_per_token(fields, num_experts),
        normalized=True,
        has_bias=True,
        tiny=0.0,
        least=fields.number("moe_norm_min"),
    )
    number = check_int("moe_num_shared_experts", fields["moe_num_shared_experts"], 0)
    shared = SharedExpert(number * inner) if number else None
    layers = _layers(fields)
    return SparseConfig(
        **decoder_fields(fields),
        experts=ExpertsConfig(num_experts, inner, routing, layers, shared),
    )


def _layers(fields: Fields) -> frozenset[int]:
    """The layers with experts: every `moe_layer_interval`th one between two indices."""
    count, step = fields.size("num_hidden_layers"), fields.size("moe_layer_interval")
    start = check_int("moe_layer_start_index", fields["moe_layer_start_index"], 0)
    end = check_int("moe_layer_end_index", fields["moe_layer_end_index"], -1)
    last = count - 1 if end == -1 else min(end, count - 1)
    return frozenset(i for i in range(start, last + 1) if (i + 1) % step == 0)


def build(config: SparseConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.row_vector import store_rows
    from nanovllm.models.interleaved import attention

    def mixer(index: int, make: "Build") -> "Mixer":
        return attention(config, index, make)

    model = sparse_model(config, make, mixer)
    store_rows(model)
    return model


FAMILY = Family(read, build, NAMES)
