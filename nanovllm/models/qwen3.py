"""Qwen3, dense: Llama with a norm on each query and key head, and windows in late layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.llama import build
from nanovllm.models.qwen2 import SIZES

DEFAULTS: Mapping[str, Any] = {**SIZES, "head_dim": 128, "max_window_layers": 28}


def read(file: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` is for all projections of attention."""
    fields = Fields(file, DEFAULTS)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
    )


FAMILY = Family(read, build)
