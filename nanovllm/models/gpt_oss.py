"""OpenAI's gpt-oss: attention with sinks, windows in every other layer, experts with biases."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import is_quantized
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.shapes import (
    ExpertCount,
    LayerShape,
    MatrixShape,
    attention_matrices,
    gated_matrices,
)
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_bool, check_int

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """The shape of gpt-oss. All layers have experts, with a hidden part of `intermediate_size`."""

    num_experts: int
    per_token: int
    swiglu_alpha: float
    swiglu_limit: float
    experts_in_turn: bool  # not in GGUF files

    def layer_shape(self, index: int) -> LayerShape:
        """With a sink for each head, and biases of the router and of the experts."""
        dense, heads, hidden = super().layer_shape(index), self.heads(index), self.hidden_size
        inner, experts = self.intermediate_size, self.num_experts
        biases = experts * (1 + 2 * inner + hidden)
        return replace(
            dense,
            matrices=(
                *attention_matrices(hidden, heads), MatrixShape("mlp.router", experts, hidden),
                *gated_matrices(hidden, inner, "mlp.experts.0", is_experts=True),
            ),
            num_others=dense.num_others + heads.num_heads + biases,
            split={}, split_experts={"intermediate_size": inner},
            experts=ExpertCount(experts, self.per_token), needs=frozenset({"sinks"}),
        )  # fmt: skip

    @property
    def sizes(self) -> str:
        return f"{super().sizes}, num_local_experts={self.num_experts}"


def read(file: Mapping[str, Any]) -> GptOssConfig:
    """Without `layer_types`, every other layer has the window, from the first one on.

    Published configs do not name a type: next to experts in MXFP4, other weights are bfloat16.
    """
    if is_quantized(file) and not any(file.get(name) for name in ("dtype", "torch_dtype")):
        file = {**file, "dtype": "bfloat16"}
    if not any(file.get(name) for name in ("rope_scaling", "rope_parameters")):
        file = {**file, "rope_parameters": YARN}
    fields = Fields(file, DEFAULTS, FIXED)
    check_activation(fields)
    if fields["layer_types"] is None:
        count = fields.size("num_hidden_layers")
        fields["layer_types"] = [FULL if index % 2 else SLIDING for index in range(count)]
    spelt = "num_experts" if "num_experts" in file else "num_local_experts"
    num_experts = fields.size(spelt)
    return GptOssConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        num_experts=num_experts,
        per_token=check_int("num_experts_per_tok", fields["num_experts_per_tok"], 1, num_experts),
        swiglu_alpha=fields.number("swiglu_alpha"),
        swiglu_limit=fields.number("swiglu_limit"),
        experts_in_turn=check_bool("experts_in_turn", file.get("experts_in_turn", True)),
    )


def build(config: GptOssConfig, make: "Build") -> "CausalLM":
    """Llama's blocks, with other attention and experts."""
    from nanovllm.layers.biased_experts import BiasedSizes, BiasedSparseMLP
    from nanovllm.layers.block import Block
    from nanovllm.layers.sink_attention import SinkSelfAttention
    from nanovllm.models import parts

    sizes = BiasedSizes(
        config.num_experts, config.per_token, config.intermediate_size, config.swiglu_alpha,
        config.swiglu_limit, config.experts_in_turn,
    )  # fmt: skip

    def block(index: int, make: "Build") -> Block:
        attention = SinkSelfAttention(
            make.inside("self_attn"), config.hidden_size, config.heads(index),
            qkv_bias=config.qkv_bias, o_bias=config.o_bias,
        )  # fmt: skip
        experts = BiasedSparseMLP(make.inside("mlp"), config.hidden_size, sizes)
        return Block(make, parts.pre_norms(config), attention, experts)

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build)
