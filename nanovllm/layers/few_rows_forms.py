"""The forms of blocks that kernels for few rows compute, and the operands of these kernels."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.layers.block import Block
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import MLP, FeedForward, SiluAndMul
from nanovllm.layers.gelu import GeluTanhAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.mixer import Mixer, ProjectedMixer, Ropes
from nanovllm.layers.plus_one_norm import factors_of
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.shared_experts import SharedSparseMLP
from nanovllm.layers.sparse_mlp import ExpertRouter, SparseMLP

if TYPE_CHECKING:
    from nanovllm.kernels.triton.linear.few_rows import FewRows  # which needs Triton

GATES: dict[type, str] = {SiluAndMul: "silu", GeluTanhAndMul: "gelu"}
Entering = Scaled | torch.Tensor  # a part's input


@runtime_checkable
class MixesFewRows(Protocol):
    """A mixer of more linear layers than two, which knows how to compute few rows."""

    def linears(self) -> tuple[LinearBase, ...]:
        """The linear layers that these kernels compute; the last one is `project`."""

    def mix_few_rows(self, few_rows: "FewRows", x: Entering, ropes: Ropes) -> torch.Tensor:
        """The mixer's output before `project`."""


def operands_of(block: Block) -> list[Any]:
    """The kernels' operands, in the order of their use; [None] for a block of another form.

    There are none of the feed-forward part if it is not fused. An operand is None if there are no
    kernels for it.
    """
    mixer, feed_forward, before_mixer, after_mixer, before, after = block.parts
    if before_mixer is None or before is None or block.residual_scale != 1.0:
        return [None]
    norms = [norm for norm in (before_mixer, after_mixer, before, after) if norm is not None]
    if any(factors_of(norm) is None for norm in norms) or not linears_of(mixer):
        return [None]
    fused = is_fused(feed_forward, after)
    if type(block) is not Block or (before.ranks.size > 1 and (after_mixer or after or not fused)):
        return [None]  # with several ranks, other forms have not been measured
    found = _operands(*linears_of(mixer))
    if not fused:
        return found
    if isinstance(feed_forward, SparseMLP):
        if isinstance(feed_forward, SharedSparseMLP):
            shared, _ = feed_forward.shared
            found += _operands(shared.gate_up_proj, shared.down_proj)
        return [*found, expert_weights(feed_forward.gate, feed_forward.experts)]
    assert isinstance(feed_forward, MLP)
    return [*found, *_operands(feed_forward.gate_up_proj, feed_forward.down_proj)]


def linears_of(mixer: Mixer) -> tuple[LinearBase, ...]:
    """The mixer's linear layers; none if these kernels cannot compute it.

    It is `attend` between two of them, or `MixesFewRows`. A subclass may compute something else.
    """
    if isinstance(mixer, MixesFewRows):
        return mixer.linears()
    own = type(mixer).mix, type(mixer).project
    if own != (ProjectedMixer.mix, ProjectedMixer.project):
        return ()
    assert isinstance(mixer, ProjectedMixer)
    return mixer.linears()


def is_fused(feed_forward: FeedForward, after: RMSNorm | None) -> bool:
    """Whether kernels compute it from scaled rows; others are called as they are."""
    if isinstance(feed_forward, SparseMLP):
        if isinstance(feed_forward, SharedSparseMLP):
            layer, gate = feed_forward.shared
            if not is_fused(layer, None):
                return False
            if gate is not None and not isinstance(gate.operand_and_bias[0], torch.Tensor):
                return False
        is_known = type(feed_forward) in (SparseMLP, SharedSparseMLP)
        return is_known and after is None and feed_forward.gate.kernel is not None
    return type(feed_forward) is MLP and type(feed_forward.act_fn) in GATES


def _operands(*linears: LinearBase) -> list[Any]:
    return [linear.operand_and_bias[0] for linear in linears]


def expert_weights(gate: ExpertRouter, experts: Experts) -> ExpertWeights | None:
    """The kernels' operands of experts. They do not sum experts over several ranks."""
    if experts.ranks.size > 1 or experts.operands is None:
        return None
    routing = gate.routing
    return ExpertWeights(gate.kernel, *experts.operands, routing.per_token, routing.sums_to_one)
