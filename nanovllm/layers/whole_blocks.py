"""Decode steps of few rows on the CPU: all blocks in one call, as `few_rows` fuses them on GPUs.

For blocks of norms, self-attention and a dense gated part, in models on one rank whose matrices
our own functions multiply. Results are equal bit for bit to those of one call after the other;
other steps and models are computed in that way.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.formats.format import Matrix
from nanovllm.kernels.cpu.library import prepare, use_pool
from nanovllm.kernels.cpu.products import multiplier
from nanovllm.kernels.cpu.whole_blocks import (
    BlockOperands,
    ContextStruct,
    LinearOperands,
    NormOperands,
    NotCoveredError,
    RopeStruct,
    WholeBlocks,
    context_struct,
    rope_struct,
)
from nanovllm.kernels.table import Kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.block import Block
from nanovllm.layers.context import adapter_rows, get_context
from nanovllm.layers.feed_forward import MLP, SiluAndMul
from nanovllm.layers.gelu import GeluTanhAndMul
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.mixer import Mixer, ProjectedMixer, Ropes, SelfAttention
from nanovllm.layers.plus_one_norm import factors_of
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.watched_blocks import WatchedBlocks

logger = logging.getLogger("nanovllm")

MOST_ROWS = 32  # for more, what Python takes is little
GATES: dict[type, str] = {SiluAndMul: "silu_and_mul", GeluTanhAndMul: "gelu_and_mul"}
Kind = tuple[int, int | None]  # a cache group, and a window


def few_rows_of(model: Any, kernels: Kernels) -> "OneCall | None":  # noqa: ARG001
    """What computes the blocks of a model's decoder in one call, compiled now.

    None if some block has another form, if our functions do not multiply all its matrices, or if
    the call cannot be compiled. If they multiply the head, too, the pool's threads do the work:
    they share the tiles of a product in less time than PyTorch's.
    """
    decoder = model.model
    blocks: list[Any] = [*decoder.layers]
    if not blocks or not all(map(has_form, blocks)) or factors_of(decoder.norm) is None:
        return None
    if not all(_is_ours(linear) for block in blocks for linear in _linears(block)):
        return None
    if _is_ours(model.lm_head):
        use_pool()
    try:
        prepare("whole_blocks")
    except RuntimeError as error:
        logger.warning("a decode step has a call for each kernel, not for all blocks: %s", error)
        return None
    return OneCall(blocks, decoder.norm)


def _is_ours(linear: LinearBase) -> bool:
    """Whether our functions multiply all matrices of a layer."""
    return all(multiplier(one, torch.bfloat16) for one in _operands_of(linear))


def has_form(block: Any) -> bool:
    """Whether the one call can compute a block; its matrices are not looked at."""
    if type(block) is not Block or block.residual_scale != 1.0:
        return False
    mixer, feed_forward, before_mixer, _, before, _ = block.parts
    if before_mixer is None or before is None or not _is_usual(mixer):
        return False
    norms = [norm for norm in block.parts[2:] if norm is not None]
    return (
        type(feed_forward).forward is MLP.forward
        and type(feed_forward.act_fn) in GATES
        and all(norm.ranks.size == 1 and factors_of(norm) is not None for norm in norms)
        and all(map(_is_plain_linear, _linears(block)))
    )


def _is_usual(mixer: Mixer) -> bool:
    """Whether it computes what `SelfAttention` does, with norms that its kernel fuses."""
    if not isinstance(mixer, SelfAttention):
        return False
    kind, attention = type(mixer), type(mixer.attn)
    own = kind.mix, kind.project, kind.attend, attention.forward, attention._attend
    usual = (
        ProjectedMixer.mix, ProjectedMixer.project, SelfAttention.attend,
        Attention.forward, Attention._attend,
    )  # fmt: skip
    return own == usual and (mixer.norms is not None or not mixer.has_head_norms)


def _is_plain_linear(linear: LinearBase) -> bool:
    return (type(linear).forward, type(linear).linear) == (LinearBase.forward, LinearBase.linear)


def _linears(block: Block) -> tuple[LinearBase, LinearBase, LinearBase, LinearBase]:
    mixer, feed_forward, *_ = block.parts
    assert isinstance(mixer, SelfAttention) and isinstance(feed_forward, MLP)
    first, last = mixer.linears()
    return first, last, feed_forward.gate_up_proj, feed_forward.down_proj


def compute_few_rows(
    few_rows: "OneCall",
    blocks: list[Any],  # noqa: ARG001  (the call knows them)
    x: torch.Tensor,
    ropes: Ropes,
    norm: RMSNorm,  # noqa: ARG001
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The normed output of the blocks for x; None if they must be computed one by one.

    That is so for steps with adapters, if the residuals before some blocks are wanted, and if
    Python must call a module, because it has hooks.
    """
    if taps or adapter_rows():
        return None
    normed = few_rows(x, ropes)
    return None if normed is None else (normed, [])


class OneCall:
    """Computes the blocks and the last norm of a decoder in one call, for few rows.

    The structures for the call are made again when a matrix, a cache or the memory of a smaller
    tensor was replaced. The objects that they point to are not kept, because others free them.
    """

    most_rows = MOST_ROWS
    form = __name__

    def __init__(self, blocks: Sequence[Block], norm: RMSNorm) -> None:
        self._blocks, self._norm = blocks, norm
        self._linears = [linear for block in blocks for linear in _linears(block)]
        mixers: list[Any] = [block.parts.mixer for block in blocks]
        self._attentions: list[Attention] = [mixer.attn for mixer in mixers]
        # The ropes, each with the smallest size of a head that it rotates.
        widest = sorted(mixers, key=lambda mixer: -mixer.head_dim)
        self._ropes: dict[str | None, int] = {mixer.rope: mixer.head_dim for mixer in widest}
        self._of_rope = [[*self._ropes].index(mixer.rope) for mixer in mixers]
        self._matrices: list[weakref.ref[Matrix]] = []
        self._caches: list[weakref.ref[torch.Tensor]] = []
        self._contexts: dict[Kind, Attention] = {}  # each with a layer that has it
        self._watched = WatchedBlocks([*blocks, norm])
        self._addresses: list[int | None] = []
        self._made: WholeBlocks | None = None

    def __call__(self, x: torch.Tensor, ropes: Ropes) -> torch.Tensor | None:
        """The norm of the residual after all blocks.

        None if some matrix has no function for it, or Python must call a module.
        """
        if self._watched.has_hooks():
            return None
        if not self._is_current():
            self._make(x.dtype)
        if self._made is None:
            return None
        made = [self._context(kind, attention) for kind, attention in self._contexts.items()]
        contexts = (ContextStruct * len(made))(*(struct for struct, _ in made))
        structs = [
            rope_struct(None if name is None else ropes[name], size)
            for name, size in self._ropes.items()
        ]
        return self._made(x, (RopeStruct * len(structs))(*structs), contexts)

    def _context(self, kind: Kind, attention: Attention) -> tuple[ContextStruct, torch.Tensor]:
        group, window = kind
        context, heads = get_context(group), attention.cache.heads
        block_size = attention.kv.k_cache.shape[1]
        return context_struct(context.plan, context.slot_mapping, heads, window, block_size)

    def _is_current(self) -> bool:
        """Whether the structures have the addresses of the layers' tensors. It runs each step."""
        if not self._matrices:
            return False
        for linear, matrix in zip(self._linears, self._matrices, strict=True):
            if linear.matrix is not matrix():
                return False
        for attention, cache in zip(self._attentions, self._caches, strict=True):
            if attention.kv.k_cache is not cache():
                return False
        return self._addresses == self._watched.addresses()

    def _make(self, dtype: torch.dtype) -> None:
        """Make the structures; none if some matrix has no function that C++ can call."""
        self._made = None
        kinds = {(each.group, each.kv.window): each for each in reversed(self._attentions)}
        self._contexts = kinds
        matrices: list[Any] = [linear.matrix for linear in self._linears]
        self._matrices = [*map(weakref.ref, matrices)]
        self._caches = [weakref.ref(attention.kv.k_cache) for attention in self._attentions]
        self._addresses = self._watched.addresses()
        last = _norm(self._norm)
        assert last is not None
        try:
            blocks = [*map(self._operands, self._blocks, self._attentions, self._of_rope)]
            self._made = WholeBlocks(blocks, last, len(last.factors), dtype)
        except NotCoveredError:
            return

    def _operands(self, block: Block, attention: Attention, rope: int) -> BlockOperands:
        mixer, feed_forward, *norms = block.parts
        assert isinstance(mixer, SelfAttention) and isinstance(feed_forward, MLP)
        head_norms: Any = mixer.norms and [NormOperands(n.weight, n.eps) for n in mixer.norms]
        context = [*self._contexts].index((attention.group, attention.kv.window))
        return BlockOperands(
            norms=tuple(map(_norm, norms)), linears=tuple(map(_linear, _linears(block))),
            head_norms=head_norms and tuple(head_norms), kv=attention.kv,
            heads=attention.cache.heads, gate=GATES[type(feed_forward.act_fn)], rope=rope,
            context=context,
        )  # fmt: skip


def _norm(norm: RMSNorm | None) -> NormOperands | None:
    if norm is None:
        return None
    factors = factors_of(norm)
    assert factors is not None
    return NormOperands(factors, norm.eps)


def _linear(linear: LinearBase) -> LinearOperands:
    return LinearOperands(_operands_of(linear), linear.added_bias)


def _operands_of(linear: LinearBase) -> list[Any]:
    """Those of a layer's matrix, or of the matrices of a `JoinedMatrix`."""
    matrices = getattr(linear.matrix, "matrices", [linear.matrix])
    return [matrix.operand for matrix in matrices]
