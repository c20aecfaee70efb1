"""HeadConfig: the `config.json` of an EAGLE-3 head, in the forms published for Llama and Qwen3.

The head is one decoder layer of Llama's kind. Its fields are at the top level of the file, or in
`transformer_layer_config` (in files of the speculators library). This module reads only JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import fields_of
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import architectures
from nanovllm.utils.checks import check_bool, check_choice, check_int, shorten

ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator",
    "Eagle3DraftModel",
)  # fmt: skip
NESTED = "transformer_layer_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_TAPS = 3
# Fields that change how a head computes, each with the value that is supported.
FIXED: Mapping[str, Any] = {
    "num_hidden_layers": 1, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "use_aux_hidden_state": True, "parallel_drafting": False, "logit_scale": 1.0, "bias": False,
    "quantization_config": None,
}  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head. Its vocabulary is `draft_vocab_size` of the model's tokens.

    `layer_ids` are the layers that it reads, as the file gives them; None means the usual ones. Its
    own residual starts from the fused residuals, or with `norm_before_residual` from their norm.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    layer_ids: tuple[int, ...] | None

    @classmethod
    def from_dir(cls, path: Path) -> "HeadConfig":
        """Read `config.json` in `path`; what is not supported is a ValueError."""
        with fields_of(path / "config.json") as raw:
            return cls._parse(raw)

    @classmethod
    def _parse(cls, raw: Mapping[str, Any]) -> "HeadConfig":
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        if _is_whole_model(name, raw):
            raise ValueError(
                f"this is a whole model, of {name}, and no EAGLE-3 head; its method in"
                ' speculative_config is "draft_model"'
            )
        check_choice("the architecture of an EAGLE-3 head", name, ARCHITECTURES)
        nested = raw.get(NESTED, raw)
        extra = raw.get("eagle_config") or {}
        for field, value in (("eagle_config", extra), (NESTED, nested)):
            if not isinstance(value, dict):
                raise TypeError(f"{field} must be an object, got {shorten(value)}")
        for field, value in FIXED.items():
            for fields in (raw, extra, nested):
                if fields.get(field, value) not in (value, None):
                    raise ValueError(f"{field}={shorten(fields[field])} is not supported")
        fields = {field: value for field, value in nested.items() if field != "draft_vocab_size"}
        layer = ModelConfig.parse({**fields, "architectures": ["LlamaForCausalLM"]})
        sizes = {"draft_vocab_size": layer.vocab_size, "target_hidden_size": layer.hidden_size}
        draft_vocab_size, target_hidden_size = (
            check_int(field, size if raw.get(field) is None else raw[field], 1)
            for field, size in sizes.items()
        )
        if draft_vocab_size > layer.vocab_size:
            raise ValueError(
                f"draft_vocab_size={draft_vocab_size} is above vocab_size={layer.vocab_size}"
            )
        before = raw.get("norm_before_residual", NESTED in raw)
        before = check_bool("norm_before_residual", before)
        layer_ids = _layer_ids(
            extra.get(LAYER_IDS) if raw.get(LAYER_IDS) is None else raw[LAYER_IDS]
        )
        return cls(layer, draft_vocab_size, target_hidden_size, before, layer_ids)

    @property
    def needs_embedding(self) -> bool:
        """Whether the head needs its own embedding, because the model's has another size."""
        return self.layer.hidden_size != self.target_hidden_size

    def taps(self, model: ModelConfig) -> tuple[int, ...]:
        """The layers of the model before which its residual is read.

        Some tools count the outputs of layers instead. Then the first number is 1, because the
        output of layer 0 is hardly useful. A model that the head is not made for is a ValueError.
        """
        own = {"target_hidden_size": self.target_hidden_size, "vocab_size": self.layer.vocab_size}
        others = {"target_hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
        for name, size in own.items():
            if size != others[name]:
                raise ValueError(
                    f"the head is made for another model: its {name} is {size}, the model's is"
                    f" {others[name]}"
                )
        num_layers = model.num_hidden_layers
        ids = self.layer_ids
        counts_outputs = ids is not None and ids[0] == 1
        taps = ids or (2, num_layers // 2, num_layers - 3)
        taps = tuple(layer + counts_outputs for layer in taps)
        if not all(0 <= layer < num_layers for layer in taps):
            given = f"without {LAYER_IDS}" if ids is None else f"with {LAYER_IDS}={list(ids)}"
            raise ValueError(
                f"{given} the head reads the residuals before layers {taps} of the model, which has"
                f" {num_layers} layers"
            )
        return taps


def _is_whole_model(name: Any, raw: Mapping[str, Any]) -> bool:
    """Whether the config describes a model that could generate text by itself."""
    if name not in ARCHITECTURES:
        return name in architectures()
    return (
        name in architectures()
        and raw.get("num_hidden_layers", 1) != 1
        and "draft_vocab_size" not in raw
    )


def _layer_ids(value: Any) -> tuple[int, ...] | None:
    """The layers that a file names, checked as far as this is possible without the model."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != NUM_TAPS:
        raise ValueError(f"{LAYER_IDS} must be a list of {NUM_TAPS} layers, got {shorten(value)}")
    return tuple(check_int(LAYER_IDS, layer, 0) for layer in value)
