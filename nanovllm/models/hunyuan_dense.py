"""HunYuan 0.5B to 7B, dense: Llama with norms of heads after their rotation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields, heads
from nanovllm.utils.checks import check_float

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "eos_token_id": 2,
}  # fmt: skip
THETA = 10_000.0  # of files without one
NAMES = Names(pieces={"query_layernorm": "q_norm", "key_layernorm": "k_norm"})


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Biases in all of attention, or nowhere; no windows."""
    fields = Fields(without_alpha(file), DEFAULTS, NO_WINDOW)
    check_activation(fields)
    bias = fields.flag("attention_bias")
    return ModelConfig(**decoder_fields(fields), qk_norm=True, qkv_bias=bias, o_bias=bias)


def without_alpha(file: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file with the `alpha` of a rope of the type "dynamic" in its theta.

    With an alpha, the frequencies do not depend on the length.
    """
    changed: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = file.get(name)
        if not isinstance(rope, Mapping) or not rope.get("alpha"):
            continue
        if rope.get("rope_type", rope.get("type")) == "dynamic":
            changed[name] = {"rope_type": "default", "rope_theta": _theta(file, rope)}
            changed["rope_theta"] = None
    return {**file, **changed}


def _theta(file: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """The rope's theta, raised by its `alpha`."""
    alpha = check_float("alpha", rope["alpha"], 0.0, above=True)
    thetas = [each["rope_theta"] for each in (rope, file) if each.get("rope_theta") is not None]
    if len({*thetas}) > 1:
        raise ValueError(f"rope_theta={thetas[1]} and {thetas[0]} of the rope's parameters differ")
    theta = check_float("rope_theta", (thetas or [THETA])[0], 1.0, above=True)
    _, _, head_dim = heads(Fields(file, DEFAULTS))
    if head_dim <= 2:
        raise ValueError(f"alpha needs a head_dim above 2, got {head_dim}")
    raised: float = theta * alpha ** (head_dim / (head_dim - 2))
    return raised


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Llama with another attention."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.late_head_norms import LateHeadNorms
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        return Block(
            make,
            parts.pre_norms(config),
            parts.attention(config, index, make.inside("self_attn"), LateHeadNorms),
            parts.mlp(config, make.inside("mlp")),
        )

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build, NAMES)
