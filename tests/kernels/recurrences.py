"""Steps of layers with states, and the recurrences in float64, one token after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates, SpaceRates
from nanovllm.kernels.operands.state_step import StateStep

SLOTS, CHECKPOINTS = 48, 24  # all, and the first one with checkpoints
DUMP = SLOTS - 1  # the last slot, for states that are not kept


@dataclass(frozen=True)
class Prefill:
    """Sequences of some lengths that begin at some positions; some tokens inside are kept."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    kept: dict[int, int] = field(default_factory=dict)  # slots by row

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def step(self, device: str) -> StateStep:
        """Sequence b has slot 1 + b: the state after its last token replaces the one before."""
        before = [1 + b if start else 0 for b, start in enumerate(self.starts)]
        after = torch.full((sum(self.lengths),), -1)
        for row, slot in self.kept.items():
            after[row] = slot
        after[self.ends[1:] - 1] = 1 + torch.arange(len(self.lengths))
        starts = torch.tensor(self.starts).numpy()
        kept = after.clone().numpy()
        return StateStep(
            torch.tensor(before, device=device), after.to(device), self.ends.numpy(),
            starts=starts, kept=kept,
        )  # fmt: skip


def decode_step(queries: int, device: str) -> StateStep:
    """Four sequences: one begins, one has unused rows, and one has no slots.

    The last token of a sequence replaces the state before its first.
    """
    before, after = torch.tensor([queries, 0, 3 * queries, 0]), torch.full((4, queries), -1)
    after[0] = 1 + torch.arange(queries)
    after[1] = 1 + queries + torch.arange(queries)
    after[2, :1] = 2 * queries + 1
    return StateStep(before.to(device), after.flatten().to(device), num_queries=queries)


def slots_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random states between those of other layers; zeros in the first slot."""
    size = int(torch.tensor(shape).prod())
    whole = torch.randn(SLOTS, size + 64)
    whole[0] = 0
    return whole.to(device, dtype)[:, :size].view(SLOTS, *shape)


def one_by_one(
    step: StateStep, states: torch.Tensor, update: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [T, ...] in float64, and all states. `update` maps (rows, states) to both."""
    states = states.double()
    outs: dict[int, torch.Tensor] = {}
    for rows, before, after in step.batches:
        state = states[before]
        for row, slot in zip(rows.unbind(1), after.unbind(1), strict=True):
            out, state = update(row, state)
            outs |= dict(zip(row.tolist(), out, strict=True))
            states[slot] = state
    return torch.stack([outs[row] for row in sorted(outs)]), states


def delta(
    qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rates: DeltaRates | ChannelRates,
    states: torch.Tensor, step: StateStep,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Heads that forget [T, H, 1], or whose channels do [T, H, Dk]."""
    _, heads, dk, dv = states.shape
    qkv, a, b = qkv.double(), a.double(), b.double()
    keys = (qkv.shape[1] - heads * dv) // 2
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(
        qkv.split([keys, keys, heads * dv], 1), (dk, dk, dv), strict=True
    ))  # fmt: skip
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
            heads // x.shape[1], 1
        )
        for x in (q, k)
    )
    x, rate = (a + rates.bias.double()).unflatten(1, (heads, -1)), rates.log_rate.double().exp()
    forget = (-rate[:, None] * F.softplus(x)).exp()
    if isinstance(rates, ChannelRates) and rates.lowest is not None:
        forget = (rates.lowest * (rate[:, None] * x).sigmoid()).exp()
    learn = b.sigmoid() * (rates.most if isinstance(rates, DeltaRates) else 1)

    def update(row: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = memory * forget[row][..., None]
        change = (v[row] - torch.einsum("nhk,nhkv->nhv", k[row], memory)) * learn[row][..., None]
        memory = memory + k[row][..., None] * change[..., None, :]
        return torch.einsum("nhk,nhkv->nhv", q[row], memory) * dk**-0.5, memory

    return one_by_one(step, states, update)


def space(
    xbc: torch.Tensor, dt: torch.Tensor, rates: SpaceRates, states: torch.Tensor, step: StateStep
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, dim, size = states.shape
    xbc = xbc.double()
    groups = (xbc.shape[1] - heads * dim) // 2
    x, b, c = (y.unflatten(1, (-1, n)) for y, n in zip(
        xbc.split([heads * dim, groups, groups], 1), (dim, size, size), strict=True
    ))  # fmt: skip
    b, c = (y.repeat_interleave(heads // y.shape[1], 1) for y in (b, c))
    time = F.softplus(dt.double() + rates.bias.double()).clamp(rates.low, rates.high)
    forget = (-rates.log_rate.double().exp() * time).exp()

    def update(row: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = (x[row] * time[row][..., None])[..., None] * b[row][..., None, :]
        state = state * forget[row][..., None, None] + new
        out = torch.einsum("nhps,nhs->nhp", state, c[row])
        return out + rates.skip.double()[:, None] * x[row], state

    return one_by_one(step, states, update)
