"""Gemma 2: norms before and after each part, soft caps, and windows in every second layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.gemma import DEFAULTS as GEMMA
from nanovllm.models.gemma import GELU
from nanovllm.models.shapes import LayerShape
from nanovllm.models.window_pattern import FIXED, with_layer_types

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

SCALAR, SCORE_CAP, LOGIT_CAP = (
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
SIZES: Mapping[str, Any] = {
    **{name: value for name, value in GEMMA.items() if name != "hidden_act"},
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": GELU,
    "sliding_window": 4096, SCALAR: 256,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {**SIZES, SCORE_CAP: 50.0, LOGIT_CAP: 30.0}


@dataclass(frozen=True, kw_only=True)
class SandwichConfig(ModelConfig):
    """Norms before and after each part. Scores are divided by the root of `query_scalar`.

    The caps of scores and of logits are soft; None: there is none.
    """

    query_scalar: float
    score_cap: float | None
    logit_cap: float | None

    def layer_shape(self, index: int) -> LayerShape:
        """Two more norms of hidden states than in Llama."""
        shape = super().layer_shape(index)
        others = shape.num_others + 2 * self.hidden_size
        needs = frozenset({"soft_cap"} if self.score_cap is not None else ())
        return replace(shape, num_others=others, needs=needs)


def sandwich_fields(fields: Fields) -> dict[str, Any]:
    """The fields of a `SandwichConfig`."""
    check_activation(fields, GELU, "hidden_activation")
    if fields.file.get("hidden_act") is not None:  # some files have both
        check_activation(fields, GELU)
    score_cap, logit_cap = (
        None if fields[name] is None else fields.number(name) for name in (SCORE_CAP, LOGIT_CAP)
    )
    bias = fields.flag("attention_bias")
    return decoder_fields(fields) | dict(
        qkv_bias=bias, o_bias=bias, query_scalar=fields.number(SCALAR), score_cap=score_cap,
        logit_cap=logit_cap,
    )  # fmt: skip


def read(file: Mapping[str, Any]) -> SandwichConfig:
    """Without `layer_types`, the first layer and every second one after it have a window."""
    fields = Fields(with_layer_types(file, DEFAULTS, interval=2), DEFAULTS, FIXED)
    return SandwichConfig(**sandwich_fields(fields))


def build(config: SandwichConfig, make: "Build") -> "CausalLM":
    """All layers have one rope."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.mixer import ROPE
    from nanovllm.models import gemma_parts, parts

    def block(index: int, make: "Build") -> Block:
        return gemma_parts.sandwich_block(
            config, index, make, rope=ROPE, query_scalar=config.query_scalar,
            soft_cap=config.score_cap,
        )  # fmt: skip

    ropes = {ROPE: parts.rope(config, make)}
    return gemma_parts.causal_lm(config, make, block, ropes, config.logit_cap)


FAMILY = Family(read, build)
