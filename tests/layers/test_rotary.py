"""Rotary tables against transformers' tables, and parameters that are refused.

In float32 an angle of 100,000 radians is exact to 0.004 only, so tables are compared for equal
frequencies, and the frequencies to the last bits.
"""

import inspect
import math
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm.kernels.plain.norm_rope_store import rotate
from nanovllm.layers.rope_types import ROPE_TYPES
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope, rope_frequencies
from nanovllm.models.rope import max_rope_positions

pytestmark = pytest.mark.usefixtures("one_thread")

Reference = Phi3RotaryEmbedding | Qwen3RotaryEmbedding
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def longrope(pairs: int, trained: int, **others: float) -> dict[str, Any]:
    """Factors that differ between pairs and between the two sets, as in published models."""
    return dict(
        rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=trained,
        short_factor=[1.0 + 0.03 * i for i in range(pairs)],
        long_factor=[1.0 + 0.02 * i * i for i in range(pairs)], **others,
    )  # fmt: skip


# head_dim, max_position_embeddings, rope parameters with their theta
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "default": (128, 131072, dict(rope_type="default", rope_theta=1e6)),
    "default, theta 10000": (64, 4096, dict(rope_type="default", rope_theta=10000.0)),
    "default, head_dim 80": (80, 4096, dict(rope_type="default", rope_theta=5e6)),
    "linear": (128, 131072, dict(rope_type="linear", rope_theta=1e6, factor=4.0)),
    "linear, factor 2.5": (96, 32768, dict(rope_type="linear", rope_theta=1e4, factor=2.5)),
    "dynamic": (128, 131072, dict(rope_type="dynamic", rope_theta=1e6, factor=4.0)),
    "yarn, as Qwen3 asks for it": (
        128, 131072,
        dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768),
    ),
    "yarn, factor 8": (
        64, 4096,
        dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=512),
    ),
    "yarn, factor 1": (
        64, 512,
        dict(rope_type="yarn", rope_theta=1e4, factor=1.0, original_max_position_embeddings=512),
    ),
    "yarn, attention_factor": (
        64, 4096,
        dict(rope_type="yarn", rope_theta=1e4, factor=8.0, attention_factor=0.5,
             original_max_position_embeddings=512),
    ),
    "yarn, betas": (
        128, 8192,
        dict(rope_type="yarn", rope_theta=1e6, factor=2.0, beta_fast=16.0, beta_slow=2.0,
             original_max_position_embeddings=4096),
    ),
    "yarn, mscale": (
        64, 40960,
        dict(rope_type="yarn", rope_theta=1e4, factor=10.0, mscale=1.2, mscale_all_dim=0.8,
             original_max_position_embeddings=4096),
    ),
    "yarn, not truncated": (
        128, 8192,
        dict(rope_type="yarn", rope_theta=1e6, factor=2.0, truncate=False,
             original_max_position_embeddings=4096),
    ),
    "yarn, an empty ramp": (
        16, 8,
        dict(rope_type="yarn", rope_theta=1e6, factor=2.0, original_max_position_embeddings=4),
    ),
    "llama3": (
        128, 131072, dict(LLAMA3, rope_theta=5e5, original_max_position_embeddings=8192),
    ),
    "llama3, factor 32": (
        64, 131072,
        dict(LLAMA3, rope_theta=5e5, factor=32.0, original_max_position_embeddings=8192),
    ),
    "longrope, long, as Phi-3-mini-128k asks for it": (96, 131072, longrope(48, 4096)),
    "longrope, long, three quarters of a head": (
        128, 131072, longrope(48, 4096, partial_rotary_factor=0.75),
    ),
    "longrope, short": (64, 4096, longrope(32, 4096)),
    "longrope, attention_factor": (64, 8192, longrope(32, 4096, attention_factor=1.25)),
    "longrope, factor": (64, 8192, longrope(32, 4096, factor=16.0)),
    "default, half of a head": (
        128, 131072, dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
}  # fmt: skip


def reference(head_dim: int, longest: int, parameters: dict[str, Any]) -> Reference:
    """transformers' embedding; its versions 4 and 5 both read this spelling of the config."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if "truncate" in scaling and "truncate" not in inspect.getsource(ROPE_INIT_FUNCTIONS["yarn"]):
        pytest.skip("this version of transformers always truncates yarn's ramp")
    if scaling["rope_type"] == "longrope" or "partial_rotary_factor" in scaling:
        return longrope_reference(head_dim, longest, parameters)
    config = Qwen3Config(
        head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4,
        max_position_embeddings=longest, rope_theta=parameters["rope_theta"],
        rope_scaling=None if scaling["rope_type"] == "default" else scaling,
    )  # fmt: skip
    return Qwen3RotaryEmbedding(config)


def longrope_reference(
    head_dim: int, longest: int, parameters: dict[str, Any]
) -> Phi3RotaryEmbedding:
    """Phi 3's embedding, with its frequencies for the full context length."""
    trained = parameters.get("original_max_position_embeddings", longest)
    config = Phi3Config(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=longest, original_max_position_embeddings=trained,
        rope_theta=parameters["rope_theta"], pad_token_id=0,
        rope_scaling={name: value for name, value in parameters.items() if name != "rope_theta"},
    )  # fmt: skip
    rope = Phi3RotaryEmbedding(config)
    rope(torch.zeros(1), torch.tensor([[longest - 1]]))
    return rope


def reference_table(rope: Reference, positions: torch.Tensor) -> torch.Tensor:
    """transformers' cosines and sines in our layout: [P, 2, D / 2]."""
    last = torch.tensor([rope.config.max_position_embeddings - 1])  # it depends on the longest
    cos, sin = (x[:, :-1] for x in rope(torch.zeros(1), torch.cat([positions, last])[None]))
    assert torch.equal(*cos[0].chunk(2, dim=-1)) and torch.equal(*sin[0].chunk(2, dim=-1))
    half = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str) -> None:
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    inv_freq, scaling = rope_frequencies(head_dim, longest, longest, parameters)
    assert inv_freq.dtype == torch.float32
    # Two roundings may come in another order: 4 units of the last place.
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=4 * 2**-23, atol=0)
    assert scaling == pytest.approx(theirs.attention_scaling, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_table_equals_transformers_for_equal_frequencies(name: str) -> None:
    """Every position of the model, up to 131,071."""
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    ours = RotaryEmbedding(theirs.inv_freq, theirs.attention_scaling, longest).table
    positions = torch.arange(longest)
    for some in positions.split(16384):
        expected = reference_table(theirs, some)
        torch.testing.assert_close(ours[some], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_get_rope_builds_the_table_of_transformers(name: str) -> None:
    """Up to 4 units of the last place of a frequency, times the position."""
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    ours = get_rope(head_dim, longest, longest, parameters).table
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    assert ours.shape == (longest, 2, rotated // 2) and ours.dtype == torch.float32
    positions = torch.cat([torch.arange(min(longest, 2048)), torch.tensor([longest - 1])])
    error = (ours[positions] - reference_table(theirs, positions)).abs().amax(dim=(1, 2))
    assert (error <= 1e-6 + positions * 4 * 2**-23 * theirs.attention_scaling).all()


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
def test_the_table_equals_cosines_in_float64(name: str) -> None:
    """Up to the error of float32 angles."""
    head_dim, longest, parameters = CASES[name]
    table = get_rope(head_dim, longest, longest, parameters).table.double()
    inv_freq = rope_frequencies(head_dim, longest, longest, parameters)[0].double()
    positions = torch.tensor([0, 1, 2, 100, 4095, 40000, longest - 1])
    angles = positions[:, None] * inv_freq
    exact = torch.stack([angles.cos(), angles.sin()], dim=1)
    bound = 1e-6 + angles[:, None] * 2**-23
    assert ((table[positions] - exact).abs() <= bound).all()


def test_every_rope_type_has_its_own_table() -> None:
    """Except `dynamic`, which equals the default up to the trained length."""
    parameters = dict(
        longrope(32, 256), rope_theta=1e6, factor=4.0, original_max_position_embeddings=256,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    tables = {t: get_rope(64, 64, 1024, dict(parameters, rope_type=t)).table for t in ROPE_TYPES}
    assert torch.equal(tables.pop("dynamic"), tables["default"])
    for name, table in tables.items():
        for other, other_table in tables.items():
            assert name == other or (table - other_table).abs().max() > 0.1, (name, other)


def test_positions_are_looked_up_in_their_rows() -> None:
    rope = get_rope(8, 100, 100, dict(rope_type="default", rope_theta=100.0))
    positions = torch.tensor([99, 0, 7, 7])
    cos, sin = rope(positions)
    assert cos.shape == sin.shape == (4, 1, 4)
    for row, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 100.0 ** (-2 * i / 8)
            assert cos[row, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert sin[row, 0, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_rotation_pairs_the_halves_of_a_head() -> None:
    """A quarter turn maps the halves (x1, x2) of a head to (-x2, x1)."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotate(x, (torch.zeros(1, 1, 2), torch.ones(1, 1, 2)))
    assert turned.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert x.tolist() == [[[1.0, 2.0, 3.0, 4.0]]], "the input was changed"


def test_rotation_of_float32_equals_its_formula() -> None:
    """As complex numbers: the halves are the real and imaginary parts."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, 32)
    rope = get_rope(32, 50, 50, dict(rope_type="default", rope_theta=1e4))(torch.arange(50))
    cos, sin = (part.double() for part in rope)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos, sin)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, rope).double(), expected, rtol=0, atol=1e-6)


def test_rotation_of_bf16_is_rounded_once() -> None:
    """It computes in float32 and rounds at the end."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, 32).bfloat16()
    rope = get_rope(32, 50, 50, dict(rope_type="default", rope_theta=1e4))(torch.arange(50))
    rotated = rotate(x, rope)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), rope).bfloat16())


def test_scores_depend_on_the_relative_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64, dtype=torch.float64), torch.randn(1, 1, 64, dtype=torch.float64)
    rope = get_rope(64, 1200, 1200, dict(rope_type="default", rope_theta=1e4))

    def score(q_position: int, k_position: int) -> float:
        at_q, at_k = (rope(torch.tensor([p])) for p in (q_position, k_position))
        return float((rotate(q, at_q) * rotate(k, at_k)).sum())

    assert score(1000, 990) == pytest.approx(score(10, 0), abs=1e-3)
    assert score(10, 0) != pytest.approx(score(0, 10), abs=1e-1)


@pytest.mark.parametrize("rope_type", ["ntk-by-parts", "su", "mrope", "Yarn", ""])
def test_unknown_rope_types_are_refused(rope_type: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{rope_type}'.*yarn"):
        get_rope(64, 128, 128, dict(rope_type=rope_type, rope_theta=1e4, factor=2.0))


@pytest.mark.parametrize(
    ("rope_type", "field"),
    [("longrope", "short_factor"), ("longrope", "long_factor"),
     ("linear", "factor"), ("yarn", "factor"), ("llama3", "factor"), ("llama3", "low_freq_factor"),
     ("llama3", "high_freq_factor")],
)  # fmt: skip
def test_missing_factors_are_refused(rope_type: str, field: str) -> None:
    parameters = {**LLAMA3, **longrope(32, 100), "rope_type": rope_type, "factor": 8.0}
    del parameters[field]
    with pytest.raises(ValueError, match=f"'{rope_type}' needs '{field}'"):
        get_rope(64, 50 if field == "short_factor" else 128, 128, parameters)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_partial_rotary_factor_narrows_the_table(rope_type: str) -> None:
    """The frequencies are those of a head as wide as the rotated part."""
    parameters = dict(LLAMA3, rope_theta=1e4) | longrope(16, 128) | dict(rope_type=rope_type)
    part = get_rope(64, 128, 128, dict(parameters, partial_rotary_factor=0.5)).table
    assert torch.equal(part, get_rope(32, 128, 128, parameters).table)


def test_the_rest_of_a_head_is_not_rotated() -> None:
    """The first four of eight elements are rotated, as pairs (0, 2) and (1, 3)."""
    x = torch.arange(1.0, 9.0).view(1, 1, 8)
    turned = rotate(x, (torch.zeros(1, 1, 2), torch.ones(1, 1, 2)))
    assert turned.tolist() == [[[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0]]]


def test_longrope_has_one_set_of_factors_for_all_positions() -> None:
    """The longest possible context decides, not the current one."""
    parameters = longrope(32, 256)
    up_to = {n: get_rope(64, n, 1024, parameters).table for n in (100, 256, 257, 1024)}
    assert torch.equal(up_to[100], up_to[256][:100])
    assert torch.equal(up_to[257], up_to[1024][:257])
    assert (up_to[257][:256] - up_to[256]).abs().max() > 0.1


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_trained_length_defaults_to_max_position_embeddings(rope_type: str) -> None:
    """Not to the number of positions in the table."""
    parameters = dict(LLAMA3, rope_type=rope_type, rope_theta=1e4)
    given = get_rope(64, 100, 4096, dict(parameters, original_max_position_embeddings=4096))
    assert torch.equal(get_rope(64, 100, 4096, parameters).table, given.table)
    assert "original_max_position_embeddings" not in parameters, "the config was changed"


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        (dict(rope_type="default"), 1000),
        (dict(rope_type="dynamic", factor=4.0), 1000),
        (dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=125), 1000),
        (dict(rope_type="longrope", original_max_position_embeddings=250), 1000),
        (dict(rope_type="linear", factor=4.0), 4000),
        (dict(rope_type="yarn", factor=4.0), 4000),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=250), 1000),
        (dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=900), 1800),
    ],
)
def test_the_longest_context_of_each_rope(parameters: dict[str, Any], longest: int) -> None:
    assert max_rope_positions(parameters, 1000) == longest
