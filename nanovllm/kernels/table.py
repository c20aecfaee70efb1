"""Which implementation of each operation the layers call: decided once, when the runner starts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.kernels import cuts, plain
from nanovllm.kernels.cuts import Cuts
from nanovllm.kernels.plain import Decoding, Rope, RowState

if TYPE_CHECKING:
    from nanovllm.kernels.few_rows import FewRows  # which needs Triton


@dataclass(frozen=True)
class Kernels:
    """A function for each operation, with the signature and the meaning of its twin in PLAIN.

    `few_rows` is another way through a layer, where it is faster; PLAIN has none.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    norm_rope_store: Callable[
        [Tensor, int, Rope, tuple[Tensor, Tensor] | None, float, Tensor, Tensor, Tensor],
        tuple[Tensor, Tensor, Tensor],
    ]
    sample: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor, Cuts], Tensor]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    read_rows: Callable[[RowState, int, int, int], Decoding]
    few_rows: Callable[[list[Tensor | None]], "FewRows | None"] = lambda _: None


PLAIN = Kernels(
    name="plain PyTorch",
    rms_norm=plain.rms_norm,
    add_rms_norm=plain.add_rms_norm,
    silu_and_mul=plain.silu_and_mul,
    norm_rope_store=plain.norm_rope_store,
    sample=plain.sample,
    draw=cuts.draw,
    experts=plain.experts,
    read_rows=plain.read_rows,
)


def triton_kernels() -> Kernels:
    """The Triton kernels; an ImportError where there is no Triton."""
    from nanovllm.kernels.draw import draw
    from nanovllm.kernels.experts import experts
    from nanovllm.kernels.few_rows import few_rows_for
    from nanovllm.kernels.norm_rope_store import norm_rope_store
    from nanovllm.kernels.read_rows import read_rows
    from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
    from nanovllm.kernels.sample import sample
    from nanovllm.kernels.silu_and_mul import silu_and_mul

    return Kernels(
        "Triton", rms_norm, add_rms_norm, silu_and_mul, norm_rope_store, sample, draw, experts,
        read_rows, few_rows_for,
    )  # fmt: skip


def compiled_kernels() -> Kernels:
    """The CPU's kernels in C++; a RuntimeError where they cannot be compiled."""
    from nanovllm.kernels import cpu_kernels as cpu

    return replace(
        PLAIN,
        name="C++",
        rms_norm=cpu.rms_norm,
        add_rms_norm=cpu.add_rms_norm,
        silu_and_mul=cpu.silu_and_mul,
        norm_rope_store=cpu.norm_rope_store,
        sample=cpu.sample,
        read_rows=cpu.read_rows,
    )
