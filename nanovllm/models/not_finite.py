"""Errors for weights that are NaN or infinite. Imported when the sum of some parameter is that."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from nanovllm.formats.stored import Loaded
from nanovllm.models.decoder import Model

WRONG = "values that are NaN or infinite; copy or download it again"


def check_each(model: Model, files: Iterable[tuple[Path, Mapping[str, Loaded]]]) -> None:
    """Raise a ValueError if some parameter has such values; names their tensor and its file.

    `files` has the tensors of each of the checkpoint's files.

    Reads all files. Finite values may have a sum that is too large for their type. Scales of
    quantized weights have checks of their own, which say more.
    """
    params = ((name, p) for name, p in model.named_parameters() if not is_scale(name))
    wrong = [name for name, param in params if not are_all_finite(param)]
    if not wrong:
        return
    for file, tensors in files:
        for name, tensor in tensors.items():
            if is_scale(name) or model.names.is_skipped(name):
                continue
            if not are_all_finite(tensor[...]):
                raise ValueError(f"tensor {name!r} in {file.name} has {WRONG}")
    dtype = str(model.get_parameter(wrong[0]).dtype).removeprefix("torch.")
    raise ValueError(f"{wrong[0]} has values that are infinite in dtype {dtype}; choose another")


def is_scale(name: str) -> bool:
    """Whether a tensor has scales of quantized values."""
    return "scale" in name.rpartition(".")[2]


def are_all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no value that is NaN or infinite.

    Codes of 8 bits are not read, nor what has no values of its own: it is stored in codes.
    """
    return tensor.itemsize == 1 or tensor.is_meta or bool(tensor.isfinite().all())
