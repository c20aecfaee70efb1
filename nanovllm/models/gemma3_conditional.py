"""The text model of Gemma 3 checkpoints that also see: 4B, 12B, 27B."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models import gemma3
from nanovllm.models.family import Family
from nanovllm.models.gemma2 import LOGIT_CAP
from nanovllm.models.text_part import SEEING_NAMES, text_part
from nanovllm.utils.checks import shorten

DEFAULTS = gemma3.DEFAULTS


def read(file: Mapping[str, Any]) -> gemma3.Gemma3Config:
    """The fields are those of `text_config`."""
    text = text_part(file)
    if text.get("use_bidirectional_attention"):
        raise ValueError("text_config: use_bidirectional_attention must not be true")
    if text.get(LOGIT_CAP) is not None:  # transformers does not read it here
        raise ValueError(f"text_config: {LOGIT_CAP} must be null, got {shorten(text[LOGIT_CAP])}")
    return gemma3.read(text)


FAMILY = Family(read, gemma3.build, SEEING_NAMES)
