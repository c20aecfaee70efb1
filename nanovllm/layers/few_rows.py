"""Decode steps of few rows: fewer kernels for blocks of the form that most models have.

Six kernels a block instead of nine, or eight with experts; with several ranks eight, as two of
them sum over the ranks. The form is a norm before each part, self-attention, and a feed-forward
part gated by silu, or of experts. Blocks of another form are computed one kernel after the other.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.table import Kernels
from nanovllm.layers.block import Block
from nanovllm.layers.context import adapter_rows
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import MLP, FeedForward, SiluAndMul
from nanovllm.layers.linear import LinearBase, RowParallelLinear
from nanovllm.layers.lora import AdapterRows
from nanovllm.layers.mixer import Ropes, SelfAttention
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.sparse_mlp import ExpertRouter, SparseMLP

if TYPE_CHECKING:
    from nanovllm.kernels.triton.linear.few_rows import FewRows  # which needs Triton


def few_rows_of(blocks: list[Any], norm: RMSNorm, kernels: Kernels) -> "FewRows | None":
    """The kernels for blocks that `norm` follows; None if this device has no faster ones.

    Blocks may be quantized differently: all need such kernels, and the lowest limit applies.
    """
    found = [kernels.few_rows(operands_of(block), norm.weight.dtype) for block in blocks]
    if not all(found) or not norm.is_plain:
        return None
    return min(found, key=lambda each: each.most_rows if each else 0)


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
    x, tapped = compute_blocks(blocks, few_rows, x, ropes, norm, taps)
    return norm(x), tapped  # one kernel for all rows


def operands_of(block: Block) -> list[Any]:
    """The kernels' operands, in the order of their use; [None] for a block of another form.

    An operand is None if there are no kernels for it.
    """
    mixer, feed_forward, before_mixer, after_mixer, before, after = block.parts
    norms = before_mixer, before
    if not all(norm is not None and norm.is_plain for norm in norms) or after_mixer or after:
        return [None]
    # A subclass may compute something else, which they would leave out. They call `attend`.
    own = (type(mixer).mix, type(mixer).project) != (SelfAttention.mix, SelfAttention.project)
    if type(block) is not Block or own or block.residual_scale != 1.0:
        return [None]
    assert isinstance(mixer, SelfAttention)
    return [*_operands(mixer.qkv_proj, mixer.o_proj), *_operands_after(feed_forward)]


def _operands(*linears: LinearBase) -> list[Any]:
    return [linear.operand_and_bias[0] for linear in linears]


def _operands_after(feed_forward: FeedForward) -> list[Any]:
    if type(feed_forward) is SparseMLP:
        return [expert_weights(feed_forward.gate, feed_forward.experts)]
    if type(feed_forward) is MLP and type(feed_forward.act_fn) is SiluAndMul:
        return _operands(feed_forward.gate_up_proj, feed_forward.down_proj)
    return [None]


def expert_weights(gate: ExpertRouter, experts: Experts) -> ExpertWeights | None:
    """The kernels' operands of experts. They do not sum experts over several ranks."""
    if experts.ranks.size > 1 or experts.operands is None:
        return None
    return ExpertWeights(gate.kernel, *experts.operands, gate.per_token, gate.normalized)


def compute_blocks(
    blocks: list[Block],
    few_rows: "FewRows",
    x: torch.Tensor,
    ropes: Ropes,
    norm: RMSNorm,
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The residual after all blocks, and the residuals before the blocks `taps`.

    `norm` follows the last block.
    """
    norms: list[Any] = [*(block.parts.before_mixer for block in blocks[1:]), norm]
    scaled: Scaled | None = None
    tapped = {}
    for index, (block, after) in enumerate(zip(blocks, norms, strict=True)):
        if index in taps:
            tapped[index] = x
        x, scaled = compute_block(block, few_rows, x, scaled, ropes, after)
    return x, [tapped[index] for index in taps]


def compute_block(
    block: Block,
    few_rows: "FewRows",
    x: torch.Tensor,
    scaled: Scaled | None,
    ropes: Ropes,
    norm: RMSNorm,
) -> tuple[torch.Tensor, Scaled]:
    """The residual after the block, and the same residual scaled for the next norm, `norm`.

    x is the residual before the block. `scaled` is x scaled for the block's first norm; None in the
    first block.
    """
    attention, feed_forward, first, _, second, _ = block.parts
    assert isinstance(attention, SelfAttention) and first is not None and second is not None
    qkv = attention.qkv_proj
    if scaled is None:
        attended = attention.mix(first(x), ropes)
    else:
        attended = attention.attend(few_rows.linear(scaled, *qkv.operand_and_bias), ropes)
    x, scaled = _add(few_rows, attended, attention.o_proj, x, second)
    if isinstance(feed_forward, SparseMLP):
        weights = expert_weights(feed_forward.gate, feed_forward.experts)
        assert weights is not None
        return few_rows.add_experts(scaled, weights, x, norm.weight, norm.eps)
    assert isinstance(feed_forward, MLP)
    gated = few_rows.gated(scaled, *feed_forward.gate_up_proj.operand_and_bias)
    return _add(few_rows, gated, feed_forward.down_proj, x, norm)


def _add(
    few_rows: "FewRows",
    x: torch.Tensor,
    linear: RowParallelLinear,
    residual: torch.Tensor,
    norm: RMSNorm,
) -> tuple[torch.Tensor, Scaled]:
    """The residual plus all ranks' outputs of `linear`, and this sum scaled for `norm`."""
    if norm.ranks.size == 1:
        return few_rows.add(x, *linear.operand_and_bias, residual, norm.weight, norm.eps)
    assert norm.ranks.peer_kernels is not None
    part = few_rows.product(x, *linear.operand_and_bias)
    return norm.ranks.peer_kernels.add_scaled(part, residual, norm.weight, norm.eps)


def with_adapters(
    few_rows: "FewRows", blocks: Iterable[Block], adapters: AdapterRows
) -> "FewRows | None":
    """The kernels for few rows with adapters; None if experts have room for some."""
    low_ranks: dict[int, LowRank] = {}
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, Experts) and module.low_ranks:
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
