"""The text model of Gemma 4 checkpoints that also see and hear."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.models import gemma4
from nanovllm.models.family import Family
from nanovllm.models.gemma4 import DEFAULTS, Gemma4Config
from nanovllm.models.text_part import text_part

__all__ = ["DEFAULTS", "FAMILY"]

OTHERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
NAMES = replace(
    gemma4.NAMES,
    prefixes={"model.language_model.": "model."},
    skipped=tuple(f"model.{name}." for name in OTHERS),
)


def read(file: Mapping[str, Any]) -> Gemma4Config:
    """The fields are those of `text_config`."""
    return gemma4.read(text_part(file))


FAMILY = Family(read, gemma4.build, NAMES)
