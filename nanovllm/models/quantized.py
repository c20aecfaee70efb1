"""The formats of a quantized model's layers, by its config and its files."""

from pathlib import Path

from nanovllm.formats.choice import QuantizedFormats
from nanovllm.formats.format import Formats
from nanovllm.formats.names import Names, usual_name
from nanovllm.formats.quantization import Quantization
from nanovllm.models.loader import read_weights


def quantized_formats(quantization: Quantization, path: Path, has_files: bool) -> Formats:
    """How the layers' weights are stored. Of quantized files it reads the names and types."""
    reads = quantization.files != "plain" and has_files
    files = read_types(path, quantization.names) if reads else None
    return QuantizedFormats(quantization=quantization, files=files)


def read_types(path: Path, names: Names) -> dict[str, str]:
    """The types of a checkpoint's tensors by their usual names. Reads no weights."""
    files = read_weights(path)
    items = (item for file in files for item in file.items() if not names.is_skipped(item[0]))
    return {usual_name(name, names): tensor.dtype for name, tensor in items}
