"""The table of kernels: for each implementation, which function computes which operation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, dtype

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.low_rank import LowRank, PairAdditions
from nanovllm.kernels.plain import (
    accept,
    draw,
    experts,
    guess_inputs,
    guess_ngrams,
    lora,
    mask,
    norm_rope_store,
    quantized_linear,
    read_table,
    rms_norm,
    sample,
    silu_and_mul,
    store_kvcache,
)
from nanovllm.kernels.plain.draw import Cuts
from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.plain.read_table import Decoding, TableState
from nanovllm.kernels.quantized import QuantizedMatrix, Rounding

if TYPE_CHECKING:  # they need Triton
    from nanovllm.kernels.triton.all_reduce import PeerKernels
    from nanovllm.kernels.triton.few_rows import FewRows
    from nanovllm.kernels.triton.route import Router


@dataclass(frozen=True)
class Kernels:
    """One function for each operation; its twin in PLAIN defines the signature and the result.

    `arrange` copies a quantized weight into the layout that `arranged_linear`, `experts` and
    `few_rows` read; `arrange_plain` copies a plain one, where that makes it faster, and `plain_of`
    returns what that was made of. `reads_plain` says that kernels read plain weights as they are
    stored, so that no library's layout may replace them. `rounding`
    gives kernels that round a number of rows as a quantized weight needs it, where it does:
    `arranged_linear` takes those rows, or ordinary ones. `few_rows` gives kernels
    that fuse several operations of a layer of such a type, where they are faster, and `router` one
    for the weight of a layer's router and rows of a type; `write_table` writes words that are still
    in the host's memory; `peers` are kernels that exchange few rows between GPUs. PLAIN has none of
    these.
    """

    name: str
    graph_safe: bool  # whether a CUDA graph can hold them: no function of a decode step syncs
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    norm_rope_store: Callable[
        [Tensor, int, Rope, tuple[Tensor, Tensor] | None, float, KVLayer, Tensor],
        tuple[Tensor, Tensor, Tensor],
    ]
    store_kvcache: Callable[[Tensor, Tensor, KVLayer, Tensor], tuple[Tensor, Tensor]]
    mask: Callable[[Tensor, Tensor], None]
    sample: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    sample_masked: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor], None]
    draw: Callable[[Tensor, Tensor, Tensor, Cuts], Tensor]
    experts: Callable[[Tensor, Any, Any, Tensor, Tensor, int], Tensor]
    read_table: Callable[[TableState, int, int, int, int], Decoding]
    guess_ngrams: Callable[[TableState, int, int, int, int], None]
    guess_inputs: Callable[[TableState, Kept | None, int, int, int], GuessInputs]
    accept: Callable[[TableState, Decoding, Tensor, int], Tensor]
    arrange: Callable[[QuantizedMatrix], Any]
    arranged_linear: Callable[[Any, Any, Tensor | None], Tensor]
    group_rows: Callable[[Tensor, int], Any]
    lora_down: Callable[[Tensor, LowRank, Any], Tensor]
    lora_up: Callable[[Tensor, LowRank, Any, Tensor, Tensor | None], None]
    adapted_experts: Callable[[Tensor, Any, Any, Tensor, Tensor, int, PairAdditions], Tensor]
    arrange_plain: Callable[[Tensor], Any | None] = lambda _: None
    plain_of: Callable[[Any], Tensor | None] = lambda _: None
    reads_plain: bool = False
    rounding: Callable[[Any, int], Rounding | None] = lambda *_: None
    few_rows: Callable[[list[Any], dtype], "FewRows | None"] = lambda *_: None
    router: Callable[[Tensor, dtype], "Router | None"] = lambda *_: None
    write_table: Callable[[Tensor, Tensor, int], None] | None = None
    peers: "type[PeerKernels] | None" = None


PLAIN = Kernels(
    name="plain PyTorch",
    graph_safe=False,
    rms_norm=rms_norm.rms_norm,
    add_rms_norm=rms_norm.add_rms_norm,
    silu_and_mul=silu_and_mul.silu_and_mul,
    norm_rope_store=norm_rope_store.norm_rope_store,
    store_kvcache=store_kvcache.store_kvcache,
    mask=mask.mask,
    sample=sample.sample,
    sample_masked=sample.sample_masked,
    draw=draw.draw,
    experts=experts.experts,
    read_table=read_table.read_table,
    guess_ngrams=guess_ngrams.guess_ngrams,
    guess_inputs=guess_inputs.guess_inputs,
    accept=accept.accept,
    arrange=lambda weight: weight,
    arranged_linear=quantized_linear.quantized_linear,
    group_rows=lora.group_rows,
    lora_down=lora.lora_down,
    lora_up=lora.lora_up,
    adapted_experts=experts.adapted_experts,
)


def triton_kernels() -> Kernels:
    """The Triton kernels. An ImportError where Triton is not installed."""
    from nanovllm.kernels.triton import (
        accept,
        all_reduce,
        draw,
        experts,
        few_rows,
        guess_inputs,
        guess_ngrams,
        lora,
        mask,
        norm_rope_store,
        quantized_linear,
        read_table,
        rms_norm,
        route,
        row_groups,
        sample,
        silu_and_mul,
        store_kvcache,
        write_table,
    )

    return Kernels(
        name="Triton",
        graph_safe=True,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        silu_and_mul=silu_and_mul.silu_and_mul,
        norm_rope_store=norm_rope_store.norm_rope_store,
        store_kvcache=store_kvcache.store_kvcache,
        mask=mask.mask,
        sample=sample.sample,
        sample_masked=sample.sample_masked,
        draw=draw.draw,
        experts=experts.experts,
        read_table=read_table.read_table,
        guess_ngrams=guess_ngrams.guess_ngrams,
        guess_inputs=guess_inputs.guess_inputs,
        accept=accept.accept,
        arrange=quantized_linear.arrange,
        arranged_linear=quantized_linear.quantized_linear,
        group_rows=row_groups.group_rows,
        lora_down=lora.lora_down,
        lora_up=lora.lora_up,
        adapted_experts=experts.adapted_experts,
        reads_plain=True,
        rounding=quantized_linear.rounding_of,
        few_rows=few_rows.few_rows_for,
        router=route.Router.of,
        write_table=write_table.write_table,
        peers=all_reduce.PeerKernels,
    )


def cpu_kernels() -> Kernels:
    """The CPU's kernels in C++; each call is a RuntimeError where they cannot be compiled."""
    from nanovllm.kernels.cpu import (
        lora,
        mask,
        norm_rope_store,
        read_table,
        rms_norm,
        sample,
        silu_and_mul,
    )
    from nanovllm.kernels.cpu.tiled_linear import (
        arrange,
        arrange_plain,
        plain_of,
        tiled_linear,
    )

    return replace(
        PLAIN,
        name="C++",
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        silu_and_mul=silu_and_mul.silu_and_mul,
        norm_rope_store=norm_rope_store.norm_rope_store,
        mask=mask.mask,
        sample=sample.sample,
        sample_masked=sample.sample_masked,
        read_table=read_table.read_table,
        arrange=arrange,
        arrange_plain=arrange_plain,
        plain_of=plain_of,
        arranged_linear=tiled_linear,
        group_rows=lora.group_rows,
        lora_down=lora.lora_down,
        lora_up=lora.lora_up,
    )
