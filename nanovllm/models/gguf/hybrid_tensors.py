"""The tensors of hybrid models in GGUF files, with the values and shapes that checkpoints have.

The converter stores -exp(A_log) in place of A_log, filters [C, width] in place of [C, 1, width],
and small tensors of state spaces with more dimensions. Of gated delta nets in which several heads
of values share each head of keys, it stores first one head of each group, then the next of each.
"""

import re
from collections.abc import Iterator

import torch

from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.models.gguf.decoded import decoded
from nanovllm.models.gguf.file import TensorInfo
from nanovllm.models.gguf.hybrid_names import SPLIT
from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.names import usual_names
from nanovllm.models.gguf.views import Ordered, View

FILTERS = ("ssm_conv1d.weight", "shortconv.conv.weight")
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
RATES = "ssm_a"
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
REORDERED = ("qwen35", "qwen35moe")  # the architectures with heads in another order
LAST = "ssm_out.weight"


def hybrid_views(name: str, info: TensorInfo, view: View, metadata: Metadata) -> dict[str, View]:
    """The views of a tensor by their names; none if it needs nothing but its usual name.

    A view without a name has that of the tensor.
    """
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return {}
    rest, tensor = match[2], view.tensor
    if rest in SPLIT:
        names, parts = usual_names(name, metadata.architecture), _of_groups(tensor, metadata)
        return {n: Ordered(view, rows) for n, rows in zip(names, parts, strict=True)}
    if rest in FILTERS and tensor.dim() == 2:
        tensor = tensor.unsqueeze(1)
    if rest in FLAT:
        tensor = tensor.flatten()
    view = View(torch.log(-tensor) if rest == RATES else tensor, view.get_dtype())
    if metadata.architecture in REORDERED and (sizes := _head_sizes(metadata)) is not None:
        view = _grouped(rest, info, view, *sizes, metadata)
    return {"": view}


def is_decoded(name: str, info: TensorInfo, metadata: Metadata) -> bool:
    """Whether blocks hold weights of several heads that are put in order: they become plain."""
    if metadata.architecture not in REORDERED or not name.endswith(f".{LAST}"):
        return False
    sizes = _head_sizes(metadata)
    return sizes is not None and bool(sizes[2] % info.kind.size)


def _head_sizes(metadata: Metadata) -> tuple[int, int, int] | None:
    """The heads of keys, the heads of values for each, and their size; None if all are alike."""
    keys, heads = metadata.size("ssm.group_count"), metadata.size("ssm.time_step_rank")
    return None if keys == heads else (keys, heads // keys, _inner(metadata) // heads)


def _inner(metadata: Metadata) -> int:
    size: int = metadata.size("ssm.inner_size")
    return size


def _of_groups(tensor: torch.Tensor, metadata: Metadata) -> Iterator[torch.Tensor]:
    """The rows of both kinds of rates: files have both of a group of heads together."""
    groups = metadata.size("ssm.group_count")
    rows = torch.arange(len(tensor), device="cpu").view(groups, 2, -1)
    return (part.flatten() for part in rows.unbind(1))


def _grouped(
    rest: str, info: TensorInfo, view: View, keys: int, per_key: int, size: int, metadata: Metadata
) -> View:
    """The view with the heads of values in the order of checkpoints."""
    heads = torch.arange(keys * per_key, device="cpu").view(per_key, keys).t().flatten()
    elements = (heads[:, None] * size + torch.arange(size, device="cpu")).flatten()
    if rest in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", RATES, "ssm_dt.bias"):
        return Ordered(view, elements if rest.startswith("attn") else heads)
    if rest in ("attn_qkv.weight", "ssm_conv1d.weight"):
        before = len(view.tensor) - len(elements)
        rows = torch.cat([torch.arange(before, device="cpu"), before + elements])
        return Ordered(view, rows)
    if rest != LAST:
        return view
    if info.kind.name not in BLOCK_TYPES:
        return Ordered(view, elements, dim=1)
    if is_decoded(f".{LAST}", info, metadata):
        return Ordered(View(decoded(view)[...], "F32"), elements, dim=1)
    return Ordered(view, elements[:: info.kind.size] // info.kind.size, dim=1)
