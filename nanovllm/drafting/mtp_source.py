"""MtpSource: the draft head in a model's own files, found and checked, which ranks can load."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.drafting.mtp_head import MtpHead, MtpNames, one_layer
from nanovllm.drafting.output_tap import OutputTap
from nanovllm.drafting.placed import made_on
from nanovllm.engine.start.placement import Placement
from nanovllm.formats.format import PLAIN_FORMATS, Formats
from nanovllm.formats.quantization import Quantization
from nanovllm.layers.ranks import ALONE
from nanovllm.models.checkpoint import fields_of, resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.dummy import load_dummy
from nanovllm.models.family import family_of
from nanovllm.models.loader import InFile, load_model, read_weights
from nanovllm.models.model_size import (
    Counted,
    WeightBytes,
    decoder_bytes,
    every,
    head_bytes,
    layer_params,
    touched,
)
from nanovllm.models.text_part import text_part
from nanovllm.speculative_config import errors_name_model
from nanovllm.utils.checks import check_int
from nanovllm.utils.resources import memory_text

logger = logging.getLogger("nanovllm")

# In a model's config.json.
NUM_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
OWN_TABLE = "mtp_use_dedicated_embeddings"
SUPPORTED = "those of Qwen3-Next, Qwen3.5, GLM-4.5 and 4.7-Flash, and DeepSeek V3 are"


@dataclass(frozen=True)
class MtpSource:
    """Loads a rank's part of the head in the files at `path`, for the model of this config."""

    path: Path
    config: ModelConfig

    def load(self, config: Config, model: CausalLM, placement: Placement) -> HeadGuesser:
        """Load this rank's part, and let the model return its output for all tokens."""
        start, is_dummy = time.perf_counter(), config.load_format == "dummy"
        formats = head_formats(self.config, self.path, has_files=not is_dummy)
        with made_on(placement):
            head = MtpHead(self.config, model, replace(model.make, formats=formats))
            with torch.no_grad():
                if is_dummy:
                    with torch.device("meta"):
                        whole = head.blank(ALONE)
                    load_dummy(head, whole, config.seed)
                else:
                    load_model(head, self.path, files=own_files(self.path, self.config))
        num_bytes = head.num_bytes
        head.bind(placement.backend)
        OutputTap(model.model)
        logger.info(
            "draft head of the model, %s loaded in %.1f s", memory_text(num_bytes),
            time.perf_counter() - start,
        )  # fmt: skip
        of_draft, models = draft_bytes(self.config, placement), ((self.config, head.eval()),)
        return HeadGuesser(head, model.model.embed_tokens, placement, of_draft, models)


def own_files(path: Path, config: ModelConfig) -> Iterator[dict[str, InFile]]:
    """The head's tensors in each file of the model."""
    names = head_names(config)
    for tensors in read_weights(path):
        yield {name: tensor for name, tensor in tensors.items() if not names.is_skipped(name)}


def head_formats(config: ModelConfig, path: Path, has_files: bool) -> Formats:
    """How the head's weights are stored, by the rules for the names in the files."""
    names, quantization = head_names(config), head_quantization(config)
    if quantization is None:
        return replace(PLAIN_FORMATS, names=names)
    from nanovllm.models.quantized import quantized_formats

    return replace(quantized_formats(quantization, path, has_files), names=names)


def head_names(config: ModelConfig) -> MtpNames:
    """The names of the head's tensors in the model's files."""
    return MtpNames.of(config)


def head_quantization(config: ModelConfig) -> Quantization | None:
    """The model's quantization, with rules for the head's names if the files have the rules."""
    quantization = config.quantization
    if quantization is None or quantization.files == "plain":  # the option's are for our names
        return quantization
    return replace(quantization, names=head_names(config))


def head_size(config: ModelConfig, itemsize: int) -> tuple[int, int]:
    """How many parameters of its own the head has, and their bytes."""
    (layer,), hidden = one_layer(config).layers, config.hidden_size
    others = layer.num_others + 3 * hidden
    number = int(layer_params(layer, every)) + 2 * hidden**2 + others
    of_linear = linear_bytes(config, WeightBytes(itemsize, head_quantization(config)), every)
    return number, int(of_linear) + others * itemsize


def draft_bytes(config: ModelConfig, placement: Placement) -> float:
    """The bytes of weights that a draft reads, on all ranks together."""
    itemsize = placement.dtype.itemsize
    own = linear_bytes(config, WeightBytes(itemsize, head_quantization(config)), touched(1))
    return own + head_bytes(config, WeightBytes(itemsize, config.quantization))


def linear_bytes(config: ModelConfig, sizes: WeightBytes, counted: Counted) -> float:
    """The bytes of the weights of the head's linear layers, and of those experts that count."""
    joined = sizes.of("model.fc", config.hidden_size, 2 * config.hidden_size)
    return decoder_bytes(one_layer(config), sizes, counted) + joined


def find_mtp(config: Config, model_config: ModelConfig) -> MtpSource:
    """The head of the engine's model; a model without one, or with an unknown one, is an error."""
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    check_config(path, model_config)
    if config.load_format != "dummy" and not any(own_files(path, model_config)):
        own = head_names(model_config).own
        with errors_name_model('method "mtp"'):
            raise ValueError(f"{path}: the files have no tensors of a draft head ({own}*)")
    return MtpSource(path, model_config)


def check_config(path: Path, model_config: ModelConfig) -> None:
    """Raise if the config.json at `path` describes no head, or one that is not supported."""
    with errors_name_model('method "mtp"'), fields_of(path / "config.json") as raw:
        _check_head(text_part(raw), model_config)


def _check_head(fields: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise a ValueError if a model's config describes no head, or one that is not supported."""
    counts = [(name, fields[name]) for name in NUM_LAYERS if fields.get(name) is not None]
    name, number = counts[0] if counts else (NUM_LAYERS[0], None)
    if number is not None:
        check_int(name, number, 0)
    if family_of(config.architecture, config.family).draft_layer is None:
        what = f"the draft head of {config.architecture} ({name}={number}) is not supported"
        if not number:
            what = f"{config.architecture} has no draft head"
        raise ValueError(f"{what}; {SUPPORTED}")
    if number == 0:
        raise ValueError(f"{name}=0: the model has no draft head")
    if number not in (1, None):
        raise ValueError(f"{name}={number}: a draft head of more than one layer is not supported")
    if fields.get(OWN_TABLE):
        raise ValueError(f"{OWN_TABLE} is true: an embedding of the draft head is not supported")
