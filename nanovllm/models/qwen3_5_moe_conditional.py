"""The text model of Qwen3.5 checkpoints that also see, with experts."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models import qwen3_5_moe
from nanovllm.models.family import Family
from nanovllm.models.qwen3_5 import WHOLE_NAMES
from nanovllm.models.text_part import text_part

DEFAULTS = qwen3_5_moe.DEFAULTS


def read(file: Mapping[str, Any]) -> qwen3_5_moe.GatedSparseConfig:
    """The fields are those of `text_config`."""
    return qwen3_5_moe.read(text_part(file))


FAMILY = Family(read, qwen3_5_moe.build, WHOLE_NAMES, qwen3_5_moe.draft_layer)
