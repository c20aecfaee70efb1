"""Solar Open: Llama with experts in all layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.assumed import check_assumed
from nanovllm.models.experts import SparseConfig, all_layers, sparse_model
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.sigmoid_experts import SPELLING, sigmoid_experts
from nanovllm.models.spellings import errors_spell, respelt

INNER = "moe_intermediate_size"
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 196_608, "hidden_size": 4096, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, INNER: 1280,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
# Fields of GLM-4.5, which transformers does not read here.
UNREAD: Mapping[str, Any] = {"first_k_dense_replace": 0, "use_qk_norm": False}


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> SparseConfig:
    """No layer is dense, whatever the `intermediate_size` of the file."""
    check_assumed(file, UNREAD)
    spelt = respelt(file, SPELLING, both=True)
    inner = spelt.get(INNER, DEFAULTS[INNER])
    fields = Fields(spelt, DEFAULTS, {**NO_WINDOW, "intermediate_size": inner})
    check_activation(fields)
    return SparseConfig(
        **decoder_fields(fields, partial_rotary=True),
        qkv_bias=fields.flag("attention_bias"),
        experts=sigmoid_experts(fields, all_layers(fields)),
    )


FAMILY = Family(read, sparse_model)
