"""The text model of Qwen3.5 checkpoints that also see."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models import qwen3_5
from nanovllm.models.family import Family
from nanovllm.models.qwen3_5 import WHOLE_NAMES, GatedConfig
from nanovllm.models.text_part import text_part

DEFAULTS = qwen3_5.DEFAULTS


def read(file: Mapping[str, Any]) -> GatedConfig:
    """The fields are those of `text_config`."""
    return qwen3_5.read(text_part(file))


FAMILY = Family(read, qwen3_5.build, WHOLE_NAMES, qwen3_5.draft_layer)
