"""The CPU's kernels of layers with states, against the plain ones and against themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates, SpaceRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.table import PLAIN, Kernels

pytestmark = pytest.mark.usefixtures("compiler", "one_thread")

CPU = cpu_kernels()
NUM_SLOTS = 40
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Layer:
    """An operation, all of its inputs for T tokens, and the states in all slots.

    Inputs are columns of wider tensors; around them is NaN.
    """

    call: Callable[..., torch.Tensor]  # of kernels, inputs, states and a step
    inputs: list[torch.Tensor]
    states: torch.Tensor
    rates: Any = None

    def run(self, kernels: Kernels, step: StateStep, states: torch.Tensor, first: int = 0) -> Any:
        """Compute the step's tokens, which are those from `first` on."""
        inputs = [x[first : first + len(step.after)] for x in self.inputs]
        return self.call(kernels, inputs, states, step)


def columns(tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.full((tokens, size + 5), torch.nan, dtype=dtype)
    wide[:, 3:-2] = torch.randn(tokens, size).to(dtype)
    return wide[:, 3:-2]


def slots_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States in slots that other states lie between, as in the pool. Nothing may read the last."""
    size = torch.Size(shape).numel()
    slots = torch.full((NUM_SLOTS, size + 64), torch.nan, dtype=dtype)
    slots[:-1, 32:-32] = torch.randn(NUM_SLOTS - 1, size).to(dtype)
    return slots[:, 32:-32].view(NUM_SLOTS, *shape)


def delta(
    tokens: int, dtype: torch.dtype, key_heads: int, heads: int, dk: int, dv: int, decay: float = 0
) -> Layer:  # fmt: skip
    rates = DeltaRates(torch.randn(heads) + decay, torch.randn(heads), 2.0)
    sizes = 2 * key_heads * dk + heads * dv, heads, heads
    return Layer(
        lambda kernels, inputs, *args: kernels.gated_delta(*inputs, rates, *args),
        [columns(tokens, size, dtype) for size in sizes], slots_of(heads, dk, dv), rates,
    )  # fmt: skip


def channels(
    tokens: int, dtype: torch.dtype, heads: int, dk: int, dv: int, lowest: float | None,
    decay: float = 0,
) -> Layer:  # fmt: skip
    rates = ChannelRates(torch.randn(heads) + decay, torch.randn(heads * dk), lowest)
    sizes = 2 * heads * dk + heads * dv, heads * dk, heads
    return Layer(
        lambda kernels, inputs, *args: kernels.channel_delta(*inputs, rates, *args),
        [columns(tokens, size, dtype) for size in sizes], slots_of(heads, dk, dv), rates,
    )  # fmt: skip


def space(
    tokens: int, dtype: torch.dtype, groups: int, heads: int, dim: int, size: int, decay: float = 0
) -> Layer:  # fmt: skip
    log_rate, bias, skip = torch.randn(3, heads).unbind()
    rates = SpaceRates(log_rate + decay, bias, skip, 0.05, 1.5)
    return Layer(
        lambda kernels, inputs, *args: kernels.state_space(*inputs, rates, *args),
        [columns(tokens, n, dtype) for n in (heads * dim + 2 * groups * size, heads)],
        slots_of(heads, dim, size), rates,
    )  # fmt: skip


def conv(tokens: int, dtype: torch.dtype, channels: int, width: int, full: bool) -> Layer:
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
    return Layer(
        lambda kernels, inputs, *args: kernels.causal_conv(
            *inputs, weight, bias if full else None, *args, full
        ),
        [columns(tokens, channels, dtype)], slots_of(width - 1, channels, dtype=dtype),
    )  # fmt: skip


DELTAS = [(2, 4, 8, 6), (1, 3, 6, 8), (1, 1, 13, 77), (1, 2, 64, 64), (2, 2, 128, 128),
          (1, 1, 256, 256)]  # fmt: skip
CHANNELS = [(2, 8, 6, None), (3, 13, 77, -5.0), (2, 128, 128, None), (1, 64, 64, -5.0)]
SPACES = [(2, 4, 3, 5), (1, 2, 64, 128), (2, 2, 16, 16), (1, 3, 20, 33), (1, 1, 33, 64)]
CONVS = [(6, 4, True), (300, 3, False), (128, 2, True), (130, 8, False), (1, 5, True)]
LAYERS = {
    f"{make.__name__}-{sizes}": partial(make, **dict(zip(names, sizes, strict=True)))
    for make, names, all_sizes in (
        (delta, ("key_heads", "heads", "dk", "dv"), DELTAS),
        (channels, ("heads", "dk", "dv", "lowest"), CHANNELS),
        (space, ("groups", "heads", "dim", "size"), SPACES),
        (conv, ("channels", "width", "full"), CONVS),
    )
    for sizes in all_sizes
}


def prefill(lengths: list[int], kept: list[int]) -> StateStep:
    """Sequences from slots 1, 2, ..., the first one from slot 0, with states after some rows."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    after = torch.full((int(ends[-1]),), -1)
    rows = sorted({*(ends[1:] - 1).tolist(), *(row for row in kept if row < len(after))})
    after[rows] = 15 + torch.arange(len(rows))
    return StateStep(torch.arange(len(lengths)), after, ends.int().numpy())


def decode(num_seqs: int, num_queries: int) -> StateStep:
    """Each sequence reads a slot that it also writes, as the engine's do."""
    own = 1 + torch.arange(num_seqs * num_queries).view(num_seqs, num_queries)
    after = own.roll(1, 1).flatten()
    after[1::3] = -1
    return StateStep(own[:, 0].contiguous(), after, num_queries=num_queries)


STEPS = st.one_of(
    st.builds(
        prefill,
        st.lists(st.integers(1, 15), min_size=1, max_size=5),
        st.lists(st.integers(0, 40), max_size=12),
    ),
    st.builds(decode, st.integers(1, 5), st.integers(1, 3)),
)


@kernel_settings(40)
@given(st.sampled_from([*LAYERS]), st.sampled_from(DTYPES), STEPS, st.integers(0, 2**31))
@example("delta-(2, 2, 128, 128)", torch.bfloat16, prefill([70, 1, 33], [2, 31, 32, 33]), 0)
@example("channels-(2, 128, 128, None)", torch.float32, prefill([70, 1, 33], [2, 31, 32, 33]), 0)
@example("space-(1, 2, 64, 128)", torch.bfloat16, prefill([70, 1, 33], [2, 31, 32, 33]), 0)
@example("conv-(130, 8, False)", torch.bfloat16, prefill([1, 3, 9, 2], [2, 3]), 0)
def test_results_are_those_of_the_twin(
    name: str, dtype: torch.dtype, step: StateStep, seed: int
) -> None:
    """And the states, in the slots that a step writes; the others stay as they are."""
    torch.manual_seed(seed)
    layer = LAYERS[name](len(step.after), dtype)
    states, expected_states = layer.states.clone(), layer.states.clone()
    out = layer.run(CPU, step, states)
    expected = layer.run(PLAIN, step, expected_states)
    assert out.dtype == dtype and out.shape == expected.shape and out.is_contiguous()
    scale = float(expected.float().abs().max())
    rtol = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=rtol, atol=2e-6 * scale)
    of_states = max(scale, float(expected_states[:-1].float().abs().max()))
    torch.testing.assert_close(states[:-1], expected_states[:-1], rtol=1e-5, atol=2e-6 * of_states)
    unwritten = [slot for slot in range(NUM_SLOTS - 1) if slot not in step.after.tolist()]
    assert torch.equal(states[unwritten], layer.states[unwritten])


def in_pieces(layer: Layer, tokens: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last states of one sequence that is computed `piece` tokens at a time."""
    states = layer.states.clone()
    outs, before = [], 0
    for first in range(0, tokens, piece):
        count = min(piece, tokens - first)
        after = torch.full((count,), -1)
        after[-1] = 1
        ends = None if count <= 3 else torch.tensor([0, count]).numpy()
        step = StateStep(torch.tensor([before]), after, ends, count)
        outs.append(layer.run(CPU, step, states, first))
        before = 1
    return torch.cat(outs), states[1]


@pytest.mark.parametrize("name", [*LAYERS])
def test_states_do_not_depend_on_steps_or_threads(name: str) -> None:
    """To the last bit: a chunk, a draft, or a prefix from the cache changes no token."""
    torch.manual_seed(4)
    tokens = 75
    layer = LAYERS[name](tokens, torch.bfloat16)
    expected = in_pieces(layer, tokens, tokens)
    for piece in (1, 2, 3, 7, 32, 33, 74):
        assert all(map(torch.equal, in_pieces(layer, tokens, piece), expected)), piece
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        again = in_pieces(layer, tokens, tokens)
        torch.set_num_threads(1)
        assert all(map(torch.equal, again, expected)), threads


@pytest.mark.parametrize("name", [*LAYERS])
def test_a_sequence_does_not_depend_on_the_batch(name: str) -> None:
    """Nor on whether states are kept in between."""
    torch.manual_seed(5)
    layer = LAYERS[name](40, torch.float32)
    states = layer.states.clone()
    step = prefill([3, 29, 8], [1, 5, 6, 20])
    out = layer.run(CPU, step, states)
    alone = StateStep(step.before[1:2], torch.full((29,), -1), torch.tensor([0, 29]).numpy())
    alone.after[-1] = slot = int(step.after[31])
    alone_states = layer.states.clone()
    assert torch.equal(layer.run(CPU, alone, alone_states, 3), out[3:32])
    assert torch.equal(alone_states[slot], states[slot])


def exact_delta(
    qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rates: DeltaRates | ChannelRates
) -> Any:  # fmt: skip
    """Outputs and the last memory of one head, token by token in float64."""
    q, k, v = (x / (i == 2 or (x.square().sum(1, True) + 1e-6).sqrt())
               for i, x in enumerate(qkv.double().chunk(3, 1)))  # fmt: skip
    decays = (-rates.log_rate.double().exp() * F.softplus(a.double() + rates.bias)).exp()
    learns = b.double().sigmoid() * (rates.most if isinstance(rates, DeltaRates) else 1)
    memory, outs = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64), []
    for token in range(len(q)):
        memory = memory * decays[token, :, None]  # of the head, or of each channel
        change = (v[token] - k[token] @ memory) * learns[token]
        memory = memory + torch.outer(k[token], change)
        outs.append(q[token] @ memory / q.shape[1] ** 0.5)
    return torch.stack(outs), memory


def exact_space(xbc: torch.Tensor, dt: torch.Tensor, rates: SpaceRates) -> Any:
    """Outputs and the last state of one head, token by token in float64."""
    x, b, c = xbc.double().chunk(3, 1)
    times = F.softplus(dt.double() + rates.bias).clamp(rates.low, rates.high)
    decays = (-rates.log_rate.double().exp() * times).exp()
    state, outs = torch.zeros(x.shape[1], b.shape[1], dtype=torch.float64), []
    for token in range(len(x)):
        state = state * decays[token] + torch.outer(times[token] * x[token], b[token])
        outs.append(state @ c[token] + rates.skip * x[token])
    return torch.stack(outs), state


@pytest.mark.parametrize("decay", [-6.0, 0.0, 4.0])
@pytest.mark.parametrize("kind", ["delta", "channels", "space"])
def test_errors_stay_small_over_many_tokens(kind: str, decay: float) -> None:
    """Float64 is the judge: of memories that last for one token, or for hundreds."""
    torch.manual_seed(6)
    tokens, sizes = 700, (1, 64, 64, None) if kind == "channels" else (1, 1, 64, 64)
    make: Any = {"delta": delta, "channels": channels, "space": space}[kind]
    layer = make(tokens, torch.float32, *sizes, decay)
    layer.states[0] = 0
    step = prefill([tokens], [])
    out = layer.run(CPU, step, layer.states)
    exact, last = (exact_space if kind == "space" else exact_delta)(*layer.inputs, layer.rates)
    for found, expected in ((out[:, 0], exact), (layer.states[15, 0], last)):
        error = (found - expected).norm() / expected.norm()
        assert error < 3e-6, float(error)


@kernel_settings(30)
@given(
    st.integers(1, 40), st.sampled_from([(1, 64), (4, 100), (3, 7), (16, 128)]),
    st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_gated_norms_are_those_of_the_twin(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, gate_first: bool, shared: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    groups, size = shape
    x, gate = (columns(rows, groups * size, dtype).unflatten(1, shape) for _ in range(2))
    weight = torch.randn(shape[1:] if shared else shape).to(dtype)
    out = CPU.gated_norm(x, gate, weight, 1e-6, gate_first)
    expected = PLAIN.gated_norm(x, gate, weight, 1e-6, gate_first)
    assert out.dtype == dtype and out.is_contiguous()
    rtol = 2.0**-6 if dtype == torch.bfloat16 else 1e-5  # rounded twice
    torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-6)
    assert (out != expected).float().mean() < 0.02 or dtype == torch.float32


def test_convolutions_of_many_taps_are_plain() -> None:
    """A config may ask for more taps than the kernel has."""
    x, weight = torch.randn(5, 6), torch.randn(6, 9)
    states, results = torch.randn(3, 8, 6), []
    for kernels, own in ((CPU, states), (PLAIN, states.clone())):
        after = torch.tensor([-1, -1, -1, -1, 1])
        step = StateStep(torch.tensor([0]), after, torch.tensor([0, 5]))
        results.append((kernels.causal_conv(x, weight, None, own, step, True), own))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
