"""The recurrences of layers with states, against definitions written for one sequence."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.rates import ChannelRates, DeltaRates, SpaceRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.causal_conv import causal_conv
from nanovllm.kernels.plain.channel_delta import channel_delta
from nanovllm.kernels.plain.gated_delta import gated_delta
from nanovllm.kernels.plain.gated_norm import gated_norm
from nanovllm.kernels.plain.state_space import state_space

LENGTHS = 5, 1, 3


def steps(lengths: tuple[int, ...]) -> tuple[StateStep, list[slice]]:
    """Sequences from slots 1, 2, ..., with the state after the last token in slots 11, 12, ...."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    after = torch.full((int(ends[-1]),), -1)
    after[ends[1:] - 1] = 11 + torch.arange(len(lengths))
    step = StateStep(1 + torch.arange(len(lengths)), after, ends.numpy())
    return step, [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def test_convolutions_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    step, parts = steps(LENGTHS)
    x, weight, bias, states = torch.randn(9, 6), torch.randn(6, 4), torch.randn(6), None
    states = torch.randn(16, 3, 6)
    old = states.clone()
    out = causal_conv(x, weight, bias, states, step, True)
    for i, part in enumerate(parts):
        inputs = torch.cat([old[1 + i], x[part]])
        expected = F.silu(F.conv1d(inputs.T[None], weight[:, None], bias, groups=6))[0].T
        torch.testing.assert_close(out[part], expected)
        assert torch.equal(states[11 + i], inputs[-3:])


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_the_gated_delta_rule_is_that_of_transformers(most: float) -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(1)
    key_heads, heads, dk, dv = 2, 4, 8, 6
    step, parts = steps(LENGTHS)
    qkv = torch.randn(9, 2 * key_heads * dk + heads * dv)
    a, b = torch.randn(9, heads), torch.randn(9, heads)
    rates = DeltaRates(torch.randn(heads), torch.randn(heads), most)
    states = torch.randn(16, heads, dk, dv)
    old = states.clone()
    out = gated_delta(qkv, a, b, rates, states, step)
    q, k, v = qkv.split([key_heads * dk, key_heads * dk, heads * dv], 1)
    for i, part in enumerate(parts):
        expected, state = module.torch_recurrent_gated_delta_rule(
            q[None, part].unflatten(2, (-1, dk)), k[None, part].unflatten(2, (-1, dk)),
            v[None, part].unflatten(2, (-1, dv)),
            g=(-rates.log_rate.exp() * F.softplus(a + rates.bias))[None, part],
            beta=most * b.sigmoid()[None, part], initial_state=old[None, 1 + i],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out[part], expected[0])
        torch.testing.assert_close(states[11 + i], state[0])


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid"])
def test_channels_forget_by_themselves_as_in_transformers(family: str) -> None:
    """Without a lowest logarithm, and with one. Their gate and their recurrence."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(1)
    heads, dim, low = 3, 8, None if family == "kimi_linear" else -5.0
    step, parts = steps(LENGTHS)
    qkv, a, b = torch.randn(9, 3 * heads * dim), torch.randn(9, heads * dim), torch.randn(9, heads)
    rates = ChannelRates(torch.randn(heads), torch.randn(heads * dim), low)
    states = torch.randn(16, heads, dim, dim)
    old = states.clone()
    out = channel_delta(qkv, a, b, rates, states, step)
    sizes = dict(linear_head_dim=dim, linear_num_heads=heads, hidden_size=heads * dim)
    name = "KimiLinearForgetGate" if low is None else "BailingHybridForgetGate"
    config = SimpleNamespace(**sizes, kda_safe_gate=True, kda_lower_bound=low)
    gate = getattr(module, name)(config)
    gate.A_log.data, gate.dt_bias.data = rates.log_rate.view(gate.A_log.shape), rates.bias
    for layer in ("f_a_proj", "f_b_proj", "f_proj"):
        setattr(gate, layer, torch.nn.Identity())
    forgets, (q, k, v) = gate(a[None]), qkv.unflatten(1, (-1, dim)).chunk(3, 1)
    for i, part in enumerate(parts):
        expected, state = module.recurrent_kimi_delta_attention(
            q[None, part], k[None, part], v[None, part], g=forgets[:, part],
            beta=b.sigmoid()[None, part], initial_state=old[None, 1 + i],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out[part], expected[0])
        torch.testing.assert_close(states[11 + i], state[0])


def test_state_spaces_are_the_closed_form() -> None:
    """The sum over all earlier tokens, each with its decay: no recurrence."""
    torch.manual_seed(2)
    heads, dim, groups, size = 4, 3, 2, 5
    step, parts = steps(LENGTHS)
    xbc, dt = torch.randn(9, heads * dim + 2 * groups * size), torch.randn(9, heads)
    rates = SpaceRates(*torch.randn(3, heads).unbind(), low=0.3, high=1.5)
    states = torch.randn(16, heads, dim, size)
    old = states.clone()
    out = state_space(xbc, dt, rates, states, step)
    x, b, c = xbc.double().split([heads * dim, groups * size, groups * size], 1)
    time = F.softplus(dt + rates.bias).clamp(0.3, 1.5).double()
    for i, part in enumerate(parts):
        for head in range(heads):
            log_decays = (-rates.log_rate[head].exp() * time[part, head]).cumsum(0)
            group = head // (heads // groups)
            keys, queries = (each[part].unflatten(1, (groups, -1))[:, group] for each in (b, c))
            values = x[part].unflatten(1, (heads, dim))[:, head]
            weights = (log_decays[:, None] - log_decays).exp().tril() * time[part, head]
            expected = (weights * (queries @ keys.T)) @ values
            first = (queries @ old[1 + i, head].double().T) * log_decays.exp()[:, None]
            expected += first + rates.skip[head] * values
            torch.testing.assert_close(out[part, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate_first", [True, False])
def test_norms_of_groups_have_a_gate(gate_first: bool) -> None:
    torch.manual_seed(3)
    x, gate, weight = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(2, 4)
    out = gated_norm(x, gate, weight, 1e-5, gate_first)
    for row in range(3):
        for group in range(2):
            each = x[row, group] * (F.silu(gate[row, group]) if gate_first else 1)
            each = F.rms_norm(each, (4,), weight[group], 1e-5)
            each = each if gate_first else each * F.silu(gate[row, group])
            torch.testing.assert_close(out[row, group], each)
