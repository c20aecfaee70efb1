"""The tensors of GGUF files, under the names and in the order of rows that checkpoints have.

They are views of mapped memory: reading copies nothing, except rows that are put in order. If the
config.json beside the file says so, matrices in blocks are read dequantized.
"""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from nanovllm.formats.scheme import DEQUANTIZED
from nanovllm.models.checkpoint import read_json
from nanovllm.models.gguf.decoded import decoded
from nanovllm.models.gguf.file import PLAIN_TYPES, GGUFFile, TensorInfo
from nanovllm.models.gguf.hybrid_names import (
    HYBRID_LAYERS,
    KEYS_OF_LATENTS,
    VALUES_OF_LATENTS,
)
from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.names import (
    NO_WEIGHTS,
    expert_names,
    has_one_row,
    has_plus_one,
    interleaved_heads,
    is_of_drafts,
    naming,
    usual_name,
)
from nanovllm.models.gguf.plain_fields import numbers
from nanovllm.models.gguf.split import GGUFModel, open_gguf
from nanovllm.models.gguf.views import Deinterleaved, View

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


def read_gguf(path: Path) -> Iterator[dict[str, View]]:
    """Yield the tensors of each file of a model by their usual names. No weights are read."""
    model = open_gguf(path)
    config = path.with_name("config.json")
    is_plain = config.is_file() and DEQUANTIZED in read_json(config)
    metadata = Metadata(model)
    small = {name: View(torch.tensor([value]), "F32") for name, value in numbers(metadata).items()}
    for file in model.files:
        views = dict(_views(file, metadata)) | small
        yield {n: decoded(view) for n, view in views.items()} if is_plain else views
        small = {}


def _content(file: GGUFFile) -> torch.Tensor:
    """All bytes of a file."""
    with warnings.catch_warnings():  # PyTorch warns of memory that cannot be written
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(file.data, dtype=torch.uint8)


def _find(name: str, model: GGUFModel) -> View | None:
    """A tensor of any of the files; None if none has it."""
    for file in model.files:
        if (info := file.tensors.get(name)) is not None:
            return View(_view(_content(file), info), info.kind.name)
    return None


def _views(file: GGUFFile, metadata: Metadata) -> Iterator[tuple[str, View]]:
    content = _content(file)
    architecture = naming(metadata.architecture, metadata.model.tensors)
    for name, info in file.tensors.items():
        if name in NO_WEIGHTS or is_of_drafts(name, metadata):
            continue
        view = View(_view(content, info), info.kind.name)
        if experts := expert_names(name, info.shape[0], architecture):
            yield from ((n, View(view[i], info.kind.name)) for i, n in enumerate(experts))
            continue
        if name.endswith(VALUES_OF_LATENTS):
            continue  # of a tensor with the keys
        if name.endswith(KEYS_OF_LATENTS):
            from nanovllm.models.gguf.latent_tensors import expansion, values_name

            values = _find(values_name(name), metadata.model)
            yield usual_name(name, architecture), expansion(name, view, values)
            continue
        if architecture in HYBRID_LAYERS:
            from nanovllm.models.gguf.hybrid_tensors import hybrid_views

            found = hybrid_views(name, info, view, metadata)
            view = found.pop("", view)
            if found:
                yield from found.items()
                continue
        if (heads := interleaved_heads(name, architecture)) is not None:
            view = _in_order(view, name, metadata.number_of_heads(heads))
        if len(view.get_shape()) == 1 and has_one_row(name, architecture):
            view = View(view.tensor[None], info.kind.name)
        if has_plus_one(name, architecture):
            view = View(view.tensor.float() - 1, "F32")
        yield usual_name(name, architecture), view


def _in_order(view: View, name: str, num_heads: int) -> View:
    if view.get_shape()[0] % (2 * num_heads):
        raise ValueError(f"tensor {name!r} has shape {view.get_shape()}, for {num_heads} heads")
    return Deinterleaved(view, num_heads)


def _view(content: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """A tensor's part of a file's bytes, in its shape."""
    kind, flat = info.kind, content[info.start : info.start + info.num_bytes]
    if kind.name not in PLAIN_TYPES:
        blocks = info.shape[-1] // kind.size
        return flat.view(*info.shape[:-1], blocks, kind.num_bytes)
    if info.start % kind.num_bytes:  # files with a small alignment
        flat = flat.clone()
    assert flat.numel() == math.prod(info.shape) * kind.num_bytes
    return flat.view(DTYPES[kind.name]).view(info.shape)
