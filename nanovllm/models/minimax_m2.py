"""MiniMax-M2: experts in all layers, norms over all heads of a token, heads rotated in part."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.assumed import check_assumed
from nanovllm.models.experts import ExpertsConfig, all_layers, experts_per_token, number_of_experts
from nanovllm.models.family import Family
from nanovllm.models.fields import (
    MAX_LAYERS,
    NO_WINDOW,
    Fields,
    check_activation,
    decoder_fields,
)
from nanovllm.models.mixtral import EXPERTS
from nanovllm.models.olmoe import OlmoeConfig, build
from nanovllm.utils.checks import check_int, shorten

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 196_608, "rope_theta": 5e6, "eos_token_id": 200_020,
    "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
ASSUMED: Mapping[str, Any] = {
    "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "attention_bias": False,
}  # fmt: skip
NAMES = Names(
    experts=EXPERTS,
    pieces={
        "block_sparse_moe": "mlp",
        "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    },
)


def read(file: Mapping[str, Any]) -> OlmoeConfig:
    """The intermediate size is that of each expert, and all layers have full attention."""
    check_assumed(file, ASSUMED)
    fields = Fields(_with_rotated_part(file), DEFAULTS, NO_WINDOW)
    check_activation(fields)
    kinds, num_layers = fields.get("attn_type_list"), fields.size("num_hidden_layers", MAX_LAYERS)
    if kinds not in (None, [], [1] * num_layers):
        raise ValueError(f"attn_type_list must be {num_layers} times 1, got {shorten(kinds)}")
    num_experts = number_of_experts(fields)
    per_token = experts_per_token(fields, num_experts)
    routing = Routing(per_token=per_token, normalized=True, scores="sigmoid", has_bias=True)
    return OlmoeConfig(
        **decoder_fields(fields, partial_rotary=True),
        clip_qkv=None,
        experts=ExpertsConfig(
            num_experts, fields.size("intermediate_size"), routing, all_layers(fields),
            size_name="intermediate_size",
        ),
    )  # fmt: skip


def _with_rotated_part(file: Mapping[str, Any]) -> dict[str, Any]:
    """Published files say `rotary_dim` instead of `partial_rotary_factor`."""
    if file.get("rotary_dim") is None:
        return {**file}
    head_dim = file.get("head_dim", DEFAULTS["head_dim"])
    part = check_int("rotary_dim", file["rotary_dim"], 2) / check_int("head_dim", head_dim, 2)
    given = file.get("partial_rotary_factor")
    if given not in (None, part):
        both = f"partial_rotary_factor={shorten(given)} and rotary_dim={file['rotary_dim']}"
        raise ValueError(f"{both} of head_dim={head_dim} differ; keep one of them")
    return {**file, "partial_rotary_factor": part}


FAMILY = Family(read, build, NAMES)
