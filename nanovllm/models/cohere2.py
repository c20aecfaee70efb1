"""Cohere's Command R7B and Command A: windows in most layers; the others rotate nothing."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.cohere import SIZES, SPELLING, CohereConfig, build, cohere_fields
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.spellings import respelt
from nanovllm.models.window_pattern import FIXED, with_layer_types

DEFAULTS: Mapping[str, Any] = {**SIZES, "sliding_window": 4096}


def read(file: Mapping[str, Any]) -> CohereConfig:
    """Without `layer_types`, every fourth layer attends to all tokens."""
    file = with_layer_types(respelt(file, SPELLING), DEFAULTS)
    fields = Fields(file, respelt(DEFAULTS, SPELLING), {**FIXED, "head_dim": None})
    others = cohere_fields(fields)
    others["rotated_layers"] = tuple(each is not None for each in others["sliding_windows"])
    return CohereConfig(**others)


FAMILY = Family(read, build)
