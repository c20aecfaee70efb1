"""Keys and values that several layers read: one layer computes and stores them, others attend.

The sharing layers have no cache and no block tables of their own. In each step they come after the
layer that stores the step's keys and values, and attend with its attention. So whatever holds for
the cache of that layer (prefix hits, forks, windows, drafts) holds for them.
"""

from typing import Any

import torch

from nanovllm.kernels.plain.norm_rope_store import rotate
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context, get_context
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.mixer import Mixer, Ropes
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.scaled_attention import ScaledAttention
from nanovllm.layers.shared_cache import SharedKeysAndValues


class LendingAttention(Attention):
    """Attention whose keys and values `num_readers` other layers read in the same step.

    A prefill step in which nothing is cached reads the step's own keys and values. They are kept
    until the last reader has attended. Readers may compute only some of the step's tokens.
    """

    num_readers = 0
    _lent: tuple[torch.Tensor, torch.Tensor] | None = None
    _rows: torch.Tensor | None = None  # None: all tokens
    _num_left = 0

    def keep_only(self, rows: torch.Tensor) -> None:
        """From now on, `attend_again` gets only the tokens `rows` of this prefill step, if any."""
        self._rows = rows
        if not len(rows):
            self._lent = None

    def attend_again(self, q: torch.Tensor) -> torch.Tensor:
        """Attention of another layer's queries [T, H, D], after this layer has attended.

        Queries that are not kept are zeros: attention computes all of a step's tokens.
        """
        context = get_context(self.group)
        if not context.is_prefill:
            return self.attention_backend.decode(q, self.kv, context)
        assert self._lent is not None, "the layer with the keys comes before those that share them"
        (k, v), rows = self._lent, self._rows
        self._num_left -= 1
        if not self._num_left:
            self._lent = None
        if rows is None:
            return self.attention_backend.prefill(q, k, v, self.kv, context)
        q = q.new_zeros(len(k), *q.shape[1:]).index_copy_(0, rows.long(), q)
        return self.attention_backend.prefill(q, k, v, self.kv, context).index_select(0, rows)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        if context.is_prefill:
            self._lent, self._num_left, self._rows = (k, v), self.num_readers, None
        return super()._attend(q, k, v, context)


class LendingScaledAttention(LendingAttention, ScaledAttention):
    """The same for checkpoints that have scales for a quantized KV cache."""


def lending_attention(make: Build) -> type[LendingAttention]:
    """The class of the attention of a layer whose keys and values others read."""
    return LendingScaledAttention if make.formats.has_kv_scales() else LendingAttention


class SharedKVAttention(Mixer):
    """Attention with queries of its own, to the keys and values of an earlier layer.

    `lender` is the attention of that layer. `heads` are those of all ranks together. `q_norm` is
    the norm of each query head before the rotation.
    """

    cache: SharedKeysAndValues

    def __init__(
        self,
        make: Build,
        hidden_size: int,
        heads: SharedKeysAndValues,
        lender: LendingAttention,
        *,
        rope: str,
        q_norm: RMSNorm,
        bias: bool = False,
    ) -> None:
        super().__init__()
        size, of = heads.num_heads * heads.head_dim, make.formats.of
        self.q_proj = MergedColumnParallelLinear(
            hidden_size, [size], bias, make.ranks, of("q_proj")
        )
        self.o_proj = RowParallelLinear(size, hidden_size, bias, make.ranks, of("o_proj"))
        self.q_norm, self.rope = q_norm, rope
        self.cache = heads.part(make.ranks.size)
        if (self.cache.heads, self.cache.window) != (lender.cache.heads, lender.cache.window):
            raise ValueError("a layer can share only the keys of a layer with its heads and window")
        lender.num_readers += 1
        self._lenders = (lender,)  # in a tuple: another layer owns it

    def keep_only(self, rows: torch.Tensor) -> None:
        """Expect only the tokens `rows` of this prefill step."""
        self._lenders[0].keep_only(rows)

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.rope

    def rounding(self, x: torch.Tensor) -> Any:
        return self.q_proj.rounding(x)

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        projected = self.q_proj(x)
        heads = projected.view(-1, self.cache.head_dim)
        q = self.q_norm(heads).view(len(projected), -1, self.cache.head_dim)
        return self._lenders[0].attend_again(rotate(q, ropes[self.rope])).flatten(1)

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(mixed)
        return out
