"""Quantize a checkpoint: read its config and the text, and write the new directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.start.placement import computing_on, resolve_device, resolve_dtype
from nanovllm.formats.scheme import DEQUANTIZE
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import errors_name
from nanovllm.models.parts import build_model
from nanovllm.quantize.files import OutputDirectory, new_directory
from nanovllm.quantize.job import Job, Summary
from nanovllm.quantize.options import QuantizeOptions
from nanovllm.quantize.text import read_samples


def quantize_checkpoint(options: QuantizeOptions) -> Summary:
    """Write the new directory, which must not exist before.

    Peak memory: one block of the model and its quantized weights, the products of its inputs, up to
    a file of the result, and the hidden states of the whole text.
    """
    out = Path(options.out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists already; give another directory, or remove it")
    path = resolve_model(
        options.model, revision=options.revision, download_dir=options.download_dir,
        quantization=DEQUANTIZE if options.dequantize else None,
    )  # fmt: skip
    config = read_config(path, options.dequantize)
    device = resolve_device(options.device)
    samples = calibration_samples(options, path, config) if options.is_calibrated else []
    dtype = resolve_dtype("auto", config.dtype, device)
    with new_directory(out) as folder, computing_on(device), defaulting(dtype):
        with errors_name(path):
            model = build_model(config, max(map(len, samples), default=1))
        with errors_name(path, model):
            job = Job(model, options, device, config.dtype)
            return job.run(path, samples, OutputDirectory(folder))


def calibration_samples(
    options: QuantizeOptions, path: Path, config: ModelConfig
) -> list[list[int]]:
    """The parts of the text, as token ids."""
    tokenizer = load_tokenizer(None, path, warns=False)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, which the calibration text needs")
    files = [Path(file) for file in options.text]
    length = min(options.max_length, config.max_context)
    return read_samples(tokenizer, files, options.num_samples, length)


def read_config(path: Path, dequantizes: bool = False) -> ModelConfig:
    """The config of a checkpoint with plain weights, or of a GGUF file that is dequantized."""
    is_gguf = any(path.glob("*.gguf"))
    if is_gguf and not dequantizes:
        raise ValueError(
            "the weights of a GGUF file were rounded when it was made; dequantize=True rounds them"
            " again, which adds errors"
        )
    if dequantizes and not is_gguf:
        raise ValueError(f"dequantize is for GGUF files, and {path} has none")
    config = ModelConfig.from_dir(path, DEQUANTIZE if dequantizes else None)
    if config.quantization is not None and config.quantization.method is not None:
        raise ValueError(
            f"{path} is quantized already, by {config.quantization.method!r}; rounding its weights"
            " again would add errors: give the checkpoint that it was made of"
        )
    return config


@contextmanager
def defaulting(dtype: torch.dtype) -> Iterator[None]:
    """Make a type PyTorch's default for a block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
