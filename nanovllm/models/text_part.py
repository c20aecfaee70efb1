"""The fields of the text model in the `config.json` of a model that also sees or hears."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.utils.checks import shorten

# Fields that belong to the whole model, if the file has them there.
OF_WHOLE = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")

# The names of modules that text does not need.
VISION = ("vision_tower.", "multi_modal_projector.")
OTHERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")

# The names in the files of transformers 5, and of older ones, of models that also see.
SEEING_NAMES = Names(
    prefixes={
        "model.language_model.": "model.", "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    skipped=(*VISION, *(f"model.{name}" for name in VISION)),
)  # fmt: skip


def whole_names(names: Names) -> Names:
    """The names in the files of the whole model, of those in the files of its text model."""
    skipped = tuple(f"model.{name}." for name in OTHERS)
    return replace(names, prefixes={"model.language_model.": "model."}, skipped=skipped)


def text_part(file: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a `file`, or of its text model with those of the whole model."""
    if "text_config" not in file:
        return file
    text = file["text_config"]
    if not isinstance(text, Mapping):
        raise TypeError(f"text_config must be an object, got {shorten(text)}")
    return {**text, **{name: file[name] for name in OF_WHOLE if file.get(name) is not None}}
