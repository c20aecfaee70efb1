"""The text model of Gemma 4 checkpoints that also see and hear."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models import gemma4
from nanovllm.models.family import Family
from nanovllm.models.text_part import text_part, whole_names

DEFAULTS = gemma4.DEFAULTS


def read(file: Mapping[str, Any]) -> gemma4.Gemma4Config:
    """The fields are those of `text_config`."""
    return gemma4.read(text_part(file))


FAMILY = Family(read, gemma4.build, whole_names(gemma4.FAMILY.names))
