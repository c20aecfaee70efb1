"""Plan: everything that a benchmark needs: a model or a shape, engine options, requests."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.shapes import SHAPES, write_shape
from nanovllm.bench.workload import MAX_MODEL_LEN, Workload, WorkloadOptions, draw_workload
from nanovllm.config import Config
from nanovllm.drafting.source import find_source
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.start.placement import resolve_device
from nanovllm.layers.ranks import Ranks
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.speculative_config import ERRORS


@dataclass(frozen=True)
class Plan:
    """A benchmark that is ready to run. The model directory of a shape only has a config."""

    shape: str | None
    name: str  # of the shape or the model, for the result
    config: Config
    model: ModelConfig
    device: torch.device
    lengths: WorkloadOptions
    workload: Workload


def make_plan(
    options: Mapping[str, Any], shape: str | None, lengths: WorkloadOptions, scratch: Path
) -> Plan:
    """Check everything, and draw the requests.

    `options` are the engine's. A shape replaces their model, and its files are in `scratch`. The
    default of `max_model_len` is 4096, or the model's if that is less. With a shape, the draft
    model or the head may also be the name of a shape.
    """
    if shape is not None:
        path = _directory(scratch, "model", shape)
        options = {"load_format": "dummy", **options, "model": write_shape(shape, path)}
        options |= _draft_shape(options, scratch)
    asked = Config(**options)
    path = resolve_model(
        asked.model, revision=asked.revision, download_dir=asked.download_dir,
        quantization=asked.quantization,
    )  # fmt: skip
    model = ModelConfig.from_dir(path, asked.quantization)
    longest = min(MAX_MODEL_LEN, model.max_position_embeddings)
    local = {"model": str(path), "revision": None}
    config = Config(**{"max_model_len": longest, **options, **local})
    lengths.check_fit(config.max_model_len or model.max_position_embeddings)
    model.check_parallel_size(config.tensor_parallel_size, config.enable_expert_parallel)
    with _errors_list_shapes(config, shape):
        _check_draft(config, model, path)
    device = resolve_device(config.device, Ranks(0, config.tensor_parallel_size))
    workload = draw_workload(lengths, model.vocab_size)
    return Plan(shape, shape or options["model"], config, model, device, lengths, workload)


def named_by_shape(text: str, scratch: Path) -> str:
    """The text with the names of shapes in place of their files in `scratch`."""
    return re.sub(rf"{re.escape(str(scratch))}/\w+/([\w.-]+)(/config\.json)?", r"\1", text)


@contextlib.contextmanager
def errors_name_shapes(scratch: Path) -> Iterator[None]:
    """A context in which errors name shapes instead of their files in `scratch`."""
    try:
        yield
    except ERRORS as error:
        text = named_by_shape(str(error), scratch)
        if text == str(error):
            raise
        raise next(kind for kind in ERRORS if isinstance(error, kind))(text) from error


def _directory(scratch: Path, use: str, shape: str) -> Path:
    """Make a directory for a shape, with the shape's name."""
    path = scratch / use / shape
    path.mkdir(parents=True, exist_ok=True)
    return path


def _draft_shape(options: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """The option `speculative_config` with a directory where it names a shape."""
    asked = options.get("speculative_config")
    if not isinstance(asked, Mapping) or asked.get("model") not in SHAPES:
        return {}
    path = _directory(scratch, "draft", asked["model"])
    model = write_shape(asked["model"], path, is_head=asked.get("method") == "eagle3")
    return {"speculative_config": {**asked, "model": model}}


@contextlib.contextmanager
def _errors_list_shapes(config: Config, shape: str | None) -> Iterator[None]:
    """A context that adds the known shapes to an error about a missing draft model or head."""
    try:
        yield
    except FileNotFoundError as error:
        asked = config.speculative_config
        if asked is None or asked.model is None or "/" in asked.model:
            raise
        hint = f"with --shape it may be one of {', '.join(SHAPES)}"
        if shape is None and asked.model in SHAPES:
            hint = "it is a shape, which can guess for another shape only: add --shape"
        raise FileNotFoundError(f"{error}; {hint}") from error


def _check_draft(config: Config, model: ModelConfig, path: Path) -> None:
    """Raise for a draft model or a head that is missing or does not fit, before any measurement."""
    asked, tokenizer = config.speculative_config, None
    if asked is None or (asked.model is None and asked.method != "mtp"):
        return
    if config.load_format != "dummy":
        tokenizer = load_tokenizer(
            config.tokenizer, path, download_dir=config.download_dir, warns=False
        )
    find_source(config, model, tokenizer)
