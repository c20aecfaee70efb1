"""A checkpoint of plain weights, and copies of it with linear layers rounded to a type of GGUF."""

import pydoc_data.topics
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

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


def rounded_checkpoint(plain: Path, name: str, folder: Path) -> Path:
    """A copy in float32 whose linear layers have weights of the type `name`."""
    kind = gguf.GGMLQuantizationType[name]
    path = folder / name
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in plain.glob("*.safetensors"):
        tensors |= load_file(file)
    for key, tensor in tensors.items():
        values = tensor.float()
        if tensor.dim() == 2 and not any(part in key for part in PLAIN):
            blocks = gguf.quants.quantize(values.numpy(), kind)
            values = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(blocks, kind)))
        tensors[key] = values
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def pages(number: int) -> list[str]:
    """Pages of Python's reference, which the standard library has, evenly chosen by title."""
    long = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    return long[:: max(1, len(long) // number)][:number]
