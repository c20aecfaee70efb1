"""A checkpoint of plain weights, and copies of it with linear layers rounded to a type of GGUF."""

import pydoc_data.topics
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from benchmarks.llama_types import LLAMA_TYPES, by_llama

# What the package gguf can quantize in blocks of 32, which divide the rows of most models.
TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
PLAIN = ("embed_tokens", "lm_head")  # our formats leave the embedding, and keep 8 bits of a head


def plain_checkpoint(model: Path, folder: Path) -> Path:
    """The model's directory; of a GGUF file, a directory with its dequantized weights."""
    if model.is_dir():
        return model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    loaded.hf_quantizer = None  # otherwise it refuses to write plain weights
    loaded.is_quantized = False
    del loaded.config.quantization_config
    path = folder / "plain"
    loaded.save_pretrained(path)
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(path)
    return path


def rounded_checkpoint(plain: Path, name: str, folder: Path, python: str | None = None) -> Path:
    """A copy in float32 whose linear layers have weights of the type `name`.

    `python` has the package llama-cpp-python, for LLAMA_TYPES.
    """
    path = folder / name
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in plain.glob("*.safetensors"):
        tensors |= load_file(file)
    tensors = {key: tensor.float() for key, tensor in tensors.items()}
    chosen = [k for k, t in tensors.items() if t.dim() == 2 and not any(p in k for p in PLAIN)]
    matrices = [tensors[key].numpy() for key in chosen]
    if name in LLAMA_TYPES:
        assert python is not None
        values = by_llama(matrices, name, path, python)
    else:
        values = by_gguf(matrices, name)
    for key, matrix in zip(chosen, values, strict=True):
        tensors[key] = torch.from_numpy(np.ascontiguousarray(matrix))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def by_gguf(matrices: list[NDArray[np.float32]], name: str) -> list[NDArray[np.float32]]:
    """The matrices, rounded to a type by the package gguf."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = (gguf.quants.quantize(matrix, kind) for matrix in matrices)
    return [gguf.quants.dequantize(each, kind) for each in blocks]


def pages(number: int) -> list[str]:
    """Pages of Python's reference, which the standard library has, evenly chosen by title."""
    long = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    return long[:: max(1, len(long) // number)][:number]
