"""The tensors of hybrid models in GGUF files, with the values and shapes that checkpoints have.

The converter stores -exp(A_log) in place of A_log, filters [C, width] in place of [C, 1, width],
and small tensors of state spaces with more dimensions.
"""

import re

import torch

FILTERS = ("ssm_conv1d.weight", "shortconv.conv.weight")
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
RATES = "ssm_a"
IN_LAYER = re.compile(r"blk\.\d+\.(.+)")


def restored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor `name` of a file as checkpoints have it; of most tensors it is the same one."""
    match = IN_LAYER.fullmatch(name)
    rest = match[1] if match else ""
    if rest in FILTERS and tensor.dim() == 2:
        return tensor.unsqueeze(1)
    if rest in FLAT:
        tensor = tensor.flatten()
    return torch.log(-tensor) if rest == RATES else tensor
