"""What the layers compute, in plain PyTorch: the definition of the kernels, Triton's and the CPU's.

It is also what runs where there are none, so it is written for the CPU. T tokens, B rows, V
tokens of the vocabulary, H query heads, KVH key heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.paged_attention import store_kvcache_torch

# Cosines and sines of a step's tokens, [T, 1, R / 2]: of a head, the first R elements are rotated.
Rope = tuple[torch.Tensor, torch.Tensor]

# Of each expert: one above the other, or in a form of their own.
Weights = torch.Tensor | list[torch.Tensor]

# Rows are drawn a few at a time, so that what a pass leaves behind is still in the cache.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
BLOCK = 64
GOLDEN = 0x9E3779B9 - (1 << 32)  # as an int32: spreads the token ids, one-to-one
SHRINK = 2.0**-31 * (1 - 2.0**-23)  # from 32 bits to [0, 1)
SMALLEST = 2.0**-32
# The multipliers of XXH64, as int64.
PRIMES = (
    0x9E3779B185EBCA87 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64), 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63 - (1 << 64), 0x27D4EB2F165667C5,
)  # fmt: skip
TOP_BIT = -(1 << 63)


class RowState(NamedTuple):
    """A row for each running sequence, and which of them a decode step is of.

    `lengths` count the tokens in the cache: the next one's position. A row with -1 is nobody's.
    """

    tokens: torch.Tensor  # [rows] in int64: the last ones, which come next
    seeds: torch.Tensor  # [rows] in int64
    lengths: torch.Tensor  # [rows] in int32
    temperatures: torch.Tensor  # [rows] in float32
    batch: torch.Tensor  # [any] in int32: rows
    block_tables: torch.Tensor  # [rows, any] in int32


class Decoding(NamedTuple):
    """What a decode step of B rows computes. A row of nobody's has slot -1 and context length 0."""

    rows: torch.Tensor  # [B] in int64, as are the next three
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor  # [B] in int32
    block_tables: torch.Tensor  # [B, width] in int32
    temperatures: torch.Tensor  # [B] in float32
    keys: torch.Tensor  # [B] in int64


def read_rows(state: RowState, num_rows: int, width: int, block_size: int) -> Decoding:
    """The step of the first `num_rows` of the batch, whose lengths go up by one.

    Block tables are the first `width` columns; what is behind a row's last block has no meaning.
    """
    rows = state.batch[:num_rows].long()
    lengths = state.lengths[rows]
    there = lengths >= 0
    positions = lengths.clamp(min=0).long()
    tables = state.block_tables[:, :width][rows]
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    state.lengths[rows] = lengths + there
    return Decoding(
        rows,
        state.tokens[rows].where(there, 0),
        positions,
        (blocks * block_size + positions % block_size).where(there, -1),
        lengths + 1,
        tables,
        state.temperatures[rows],
        noise_keys(state.seeds[rows], lengths + 1),
    )


def noise_keys(seeds: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """The keys of draws: XXH64 of the numbers of tokens so far, in 64 bits, less 2^63."""
    p1, p2, p3, p4, p5 = PRIMES
    x = seeds + (p5 + 8)
    x = _rotate_left(x ^ (_rotate_left(num_tokens.long() * p2, 31) * p1), 27) * p1 + p4
    x = (x ^ _shift_right(x, 33)) * p2
    x = (x ^ _shift_right(x, 29)) * p3
    return x ^ _shift_right(x, 32) ^ TOP_BIT


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Zeros come in, not the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits) | _shift_right(x, 64 - bits)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of x, in float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual`, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of x [T, 2 * I], gate beside up: [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class Scaled:
    """Rows [T, K] whose norm lacks its factor: 1 / sqrt(sum(squares) / K + eps), of each row."""

    product: torch.Tensor  # of the rows and the norm's weight
    squares: torch.Tensor  # [T, any], float32: parts of the rows' sums of squares
    eps: float

    def normed(self) -> torch.Tensor:
        """The norm, in float32."""
        squares = self.squares.sum(dim=1, keepdim=True)
        return self.product.float() * torch.rsqrt(squares / self.product.shape[1] + self.eps)


def scaled_linear(
    x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`norm @ weight.T + bias`, in float32 inside."""
    return _wide_linear(x.normed(), weight, bias).to(x.product.dtype)


def scaled_gated(x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up` of such a product, in float32 inside."""
    return silu_and_mul(_wide_linear(x.normed(), weight, bias)).to(x.product.dtype)


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, Scaled]:
    """`residual + x @ weight.T + bias`, in float32 inside, and that sum for a norm's weight."""
    total = (residual.float() + _wide_linear(x.float(), weight, bias)).to(x.dtype)
    squares = total.float().square().sum(dim=1, keepdim=True)
    return total, Scaled(total * norm, squares, eps)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())


def experts(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    expert_ids: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Of each row of x [T, hidden], its K experts' outputs, added up by their shares in float32.

    The experts' weights are gate_up [E, 2 * I, hidden] and down [E, hidden, I]; a row's are named
    by expert_ids [T, K], with shares [T, K]. Of all `num_experts`, these may be a part: ids count
    from the first of them, and one below 0 or from E on is elsewhere, and adds nothing. Rows go
    through an expert together, by `linear` with its weights, and an expert that no row names is not
    touched. Sums are in the order of experts, whoever else is there. Syncs.
    """
    assert len(down) <= num_experts
    per_row = expert_ids.shape[1]
    flat_shares = shares.flatten()
    ids, pairs = expert_ids.flatten().sort(stable=True)  # pairs of a row and an expert
    bounds = torch.searchsorted(ids, torch.arange(-1, len(down), device=ids.device), right=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if start < stop:
            chosen = pairs[start:stop]
            rows = chosen // per_row
            y = linear(silu_and_mul(linear(x[rows], gate_up[expert])), down[expert])
            out.index_add_(0, rows, y.float() * flat_shares[chosen, None])
    return out.to(x.dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the first R elements of each head of x [T, H, D], as pairs (i, i + R / 2).

    In float32 inside; elements after them pass as they are.
    """
    cos, sin = rope
    half = cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x1, x2, rest = x.float().tensor_split((half, 2 * half), dim=-1)
    out1, out2, out_rest = out.tensor_split((half, 2 * half), dim=-1)
    out1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
    out2.copy_((x2 * cos).addcmul_(x1, sin))
    if rest.shape[-1]:
        out_rest.copy_(rest)
    return out


def norm_rope_store(
    qkv: torch.Tensor,
    num_kv_heads: int,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], keys and values [T, KVH, D] of qkv [T, H + 2 * KVH, D].

    Queries and keys are normalised with the weights `norms`, where there are any, and rotated; keys
    and values go to their slots of the caches too, -1 to none. Values are a view.
    """
    heads = [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.split(qkv, heads, dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = rotate(q, rope), rotate(k, rope)
    if k_cache.numel():  # the warm-up that measures memory runs before there is a cache
        store_kvcache_torch(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], greedy rows and temperature rows together.

    Gumbel-max: tokens race with arrival times that are exponential at the rates exp(logits /
    temperature), and a race is won in proportion to the rates, so the first to arrive is a draw
    from the softmax. A row's times are a hash of its key and the token id, and the key is one of
    seed and position: what a request draws does not depend on its neighbours, and rounding can
    change it only where the first two arrive within that rounding.

    Temperatures [B] in float32, 0 for greedy; keys [B] in int64, all bits well mixed. None says
    that every row is greedy. A row with NaN gives some id of the vocabulary. Peak memory:
    CHUNK_ELEMENTS values of 4 bytes, three times.
    """
    if temperatures is None or keys is None:
        return first_max(logits)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    step = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab_size)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device).mul_(GOLDEN)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        times = log_exponential(keys[rows], ids)
        scores = times.mul_(-temperatures[rows, None]).add_(logits[rows])
        tokens[rows] = first_max(scores)
    return tokens


def log_exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of standard exponential numbers [B, V]: a hash of each key and spread token id.

    Two rounds of multiply and xor-shift over 32 bits, the halves of the key going in before each.
    All finite; the small times, which win, keep their full precision.
    """
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    x = (ids ^ low).mul_(0x21F0AAAD)
    x.bitwise_xor_(x >> 15).add_(high).mul_(0x735A2D97)
    x.bitwise_xor_(x >> 15)
    # u in (0, 1), its sign turned; log1p(-u) is the negative of an exponential number.
    minus_u = x.float().abs_().mul_(-SHRINK).sub_(SMALLEST)
    return minus_u.log1p_().neg_().log_()


def first_max(x: torch.Tensor) -> torch.Tensor:
    """Index of the first largest entry of each row of x [B, V]: argmax, several times faster.

    The maxima of blocks are found with vector instructions, which an index does not allow.
    """
    num_rows, size = x.shape
    if size % BLOCK:
        return x.max(dim=-1).indices
    blocks = x.view(num_rows, -1, BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(num_rows, device=x.device)
    return block * BLOCK + blocks[rows, block].argmax(dim=-1)
