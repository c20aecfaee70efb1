"""Decode steps of few rows: fewer kernels for blocks of the forms that most models have.

With a norm before each part, attention, and a gated feed-forward part: six kernels a block instead
of nine, or eight with experts; with several ranks eight, as two of them sum over the ranks. With
norms after the parts, too, eight instead of eleven. The mixer is between two linear layers, or
`MixesFewRows`; the feed-forward part may be any. Blocks of another form are computed one kernel
after the other.

A part's input is `Scaled` where its first kernel finishes the norm, and else a normed tensor.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.table import Kernels
from nanovllm.layers.block import Block
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.few_rows_forms import (
    GATES,
    Entering,
    MixesFewRows,
    expert_weights,
    is_fused,
    linears_of,
    operands_of,
)
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.lora import AdapterRows
from nanovllm.layers.mixer import ProjectedMixer, Ropes
from nanovllm.layers.plus_one_norm import factors_of
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.shared_experts import SharedSparseMLP
from nanovllm.layers.sparse_mlp import ExpertRouter, SparseMLP

if TYPE_CHECKING:
    from nanovllm.kernels.triton.linear.few_rows import FewRows  # which needs Triton

# The most rows if only the products of mixers are fused: for more, cuBLAS is faster.
MOST_NORMED = 64


def few_rows_of(model: Any, kernels: Kernels) -> "FewRows | None":
    """The kernels for the blocks and the norm of a decoder; None if this device has no faster ones.

    Blocks may be quantized differently: all need such kernels, and the lowest limit applies.
    """
    decoder = model.model
    norm, operands = decoder.norm, [operands_of(block) for block in decoder.layers]
    found = [kernels.few_rows(each, norm.weight.dtype) for each in operands]
    if not all(found) or factors_of(norm) is None:
        return None
    lowest = min(found, key=lambda each: each.most_rows if each else 0)
    parts = (block.parts for block in decoder.layers)
    if lowest and any(not is_fused(each.feed_forward, each.after_feed_forward) for each in parts):
        return replace(lowest, most_rows=min(lowest.most_rows, MOST_NORMED))
    return lowest


def _factors(norm: RMSNorm) -> torch.Tensor:
    """Those of a norm that these kernels compute."""
    factors = factors_of(norm)
    assert factors is not None
    return factors


def agreed_few_rows(few_rows: "FewRows | None", norm: RMSNorm, ranks: Ranks) -> "FewRows | None":
    """The kernels with the lowest limit of all ranks; None if some rank has none."""
    most = ranks.peer_kernels.most_rows(norm.weight[None]) if ranks.peer_kernels else 0
    most = ranks.minimum(min(most, few_rows.most_rows) if few_rows else 0)
    return replace(few_rows, most_rows=most) if few_rows and most else None


def compute_few_rows(
    few_rows: "FewRows",
    blocks: list[Any],
    x: torch.Tensor,
    ropes: Ropes,
    norm: RMSNorm,
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The normed output of the blocks for x, and the residuals before the blocks `taps`.

    None if the rows' adapters do not allow it. In a decode graph, Python runs this only when the
    graph is captured.
    """
    if adapters := adapter_rows():
        adapted = None if taps else with_adapters(few_rows, blocks, adapters)
        if adapted is None:
            return None
        few_rows = adapted
    return compute_blocks(blocks, few_rows, x, ropes, norm, taps)


def compute_blocks(
    blocks: list[Block],
    few_rows: "FewRows",
    x: torch.Tensor,
    ropes: Ropes,
    norm: RMSNorm,
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The norm of the residual after all blocks, and the residuals before the blocks `taps`.

    `norm` follows the last block.
    """
    norms: list[Any] = [*(block.parts.before_mixer for block in blocks), norm]
    entering: Entering = norms[0](x)
    tapped = {}
    for index, (block, after) in enumerate(zip(blocks, norms[1:], strict=True)):
        if index in taps:
            tapped[index] = x
        x, entering = compute_block(block, few_rows, x, entering, ropes, after)
    normed = norm(x) if isinstance(entering, Scaled) else entering  # one kernel for all rows
    return normed, [tapped[index] for index in taps]


def compute_block(
    block: Block,
    few_rows: "FewRows",
    x: torch.Tensor,
    entering: Entering,
    ropes: Ropes,
    norm: RMSNorm,
) -> tuple[torch.Tensor, Entering]:
    """The residual after the block, and what enters the next one, whose norm is `norm`.

    x is the residual before the block, and `entering` its norm.
    """
    mixer, feed_forward, _, after_mixer, before, after = block.parts
    assert before is not None
    *_, last = linears_of(mixer)
    if isinstance(mixer, MixesFewRows):
        attended = mixer.mix_few_rows(few_rows, entering, ropes)
    else:
        assert isinstance(mixer, ProjectedMixer)
        first, _ = mixer.linears()
        attended = mixer.attend(few_rows.linear(entering, *first.operand_and_bias), ropes)
    fused = is_fused(feed_forward, after)
    x, entering = _add_linear(few_rows, attended, last, x, after_mixer, before, fused)
    if not fused:
        assert isinstance(entering, torch.Tensor)
        return _add(feed_forward(entering), x, after, norm)
    if isinstance(feed_forward, SparseMLP):
        weights = expert_weights(feed_forward.gate, feed_forward.experts)
        assert weights is not None and isinstance(entering, Scaled)
        if isinstance(feed_forward, SharedSparseMLP):
            layer, gate = feed_forward.shared
            gated = _gates(few_rows, entering, layer)
            if gate is not None:
                gated = few_rows.weigh(entering, gate.operand_and_bias[0], gated)
            x, _ = _add_linear(few_rows, gated, layer.down_proj, x, None, norm, True)
        return few_rows.add_experts(entering, weights, x, _factors(norm), norm.eps)
    assert isinstance(feed_forward, MLP)
    gated = _gates(few_rows, entering, feed_forward)
    return _add_linear(few_rows, gated, feed_forward.down_proj, x, after, norm, True)


def _gates(few_rows: "FewRows", x: Entering, layer: MLP) -> torch.Tensor:
    """The input of the layer's `down_proj`."""
    return few_rows.gated(x, *layer.gate_up_proj.operand_and_bias, GATES[type(layer.act_fn)])


def _add_linear(
    few_rows: "FewRows",
    x: torch.Tensor,
    linear: LinearBase,
    residual: torch.Tensor,
    after: RMSNorm | None,
    norm: RMSNorm,
    scales: bool,
) -> tuple[torch.Tensor, Entering]:
    """The residual plus all ranks' outputs of `linear`, and the norm of this sum.

    `after` is the norm of the outputs. If there is none, and the next part `scales`, the norm is
    left to it.
    """
    if after is not None or not scales:
        return _add(few_rows.product(x, *linear.operand_and_bias), residual, after, norm)
    if norm.ranks.size == 1:
        return few_rows.add(x, *linear.operand_and_bias, residual, _factors(norm), norm.eps)
    assert norm.ranks.peer_kernels is not None
    part = few_rows.product(x, *linear.operand_and_bias)
    return norm.ranks.peer_kernels.add_scaled(part, residual, _factors(norm), norm.eps)


def _add(
    x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual plus x, or plus its norm `after`, and the norm of this sum."""
    if after is None:
        normed, total = norm.add(x, residual)
    else:
        normed, total = norm.kernels.add_normed(
            x, _factors(after), after.eps, residual, _factors(norm), norm.eps
        )
    return total, normed


def with_adapters(
    few_rows: "FewRows", blocks: list[Any], adapters: AdapterRows
) -> "FewRows | None":
    """The kernels for few rows with adapters; None if experts or their gate have room for some.

    Also None if a gate's input is already normed: the kernels add adapters to scaled ones.
    """
    if any(block.parts.after_mixer for block in blocks):
        return None
    low_ranks: dict[int, LowRank] = {}
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, Experts) and module.low_ranks:
            return None
        if isinstance(module, SharedSparseMLP) and module.shared[1] and module.shared[1].low_rank:
            return None
        if isinstance(module, ExpertRouter):
            continue
        if isinstance(module, LinearBase) and module.low_rank:
            low_ranks[id(module.operand_and_bias[0])] = module.low_rank
    from nanovllm.kernels.triton.lora.adapted_few_rows import AdaptedFewRows, with_counters

    return AdaptedFewRows(
        most_rows=few_rows.most_rows, arrivals=few_rows.arrivals, groups=adapters.groups,
        adapters=with_counters(low_ranks),
    )  # fmt: skip
