"""Decode steps of few rows that have adapters."""

from typing import TYPE_CHECKING

from torch import nn

from nanovllm.kernels.low_rank import LowRank
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.lora import AdapterRows

if TYPE_CHECKING:  # they need Triton
    from nanovllm.kernels.triton.few_rows import FewRows


def with_adapters(
    few_rows: "FewRows", layers: nn.ModuleList, adapters: AdapterRows
) -> "FewRows | None":
    """The kernels for few rows with adapters; None if experts have room for some."""
    low_ranks: dict[int, LowRank] = {}
    for module in layers.modules():
        if isinstance(module, Experts) and module.low_ranks:
            return None
        if isinstance(module, LinearBase) and module.low_rank:
            low_ranks[id(module.operand_and_bias[0])] = module.low_rank
    from nanovllm.kernels.triton.adapted_few_rows import AdaptedFewRows, with_counters

    return AdaptedFewRows(
        most_rows=few_rows.most_rows, arrivals=few_rows.arrivals, groups=adapters.groups,
        adapters=with_counters(low_ranks),
    )  # fmt: skip
