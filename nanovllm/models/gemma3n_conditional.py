"""The text model of Gemma 3n checkpoints that also see and hear."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models import gemma3n
from nanovllm.models.family import Family
from nanovllm.models.text_part import text_part, whole_names

DEFAULTS = gemma3n.DEFAULTS


def read(file: Mapping[str, Any]) -> gemma3n.Gemma3nConfig:
    """The fields are those of `text_config`."""
    return gemma3n.read(text_part(file))


FAMILY = Family(read, gemma3n.build, whole_names(gemma3n.FAMILY.names))
