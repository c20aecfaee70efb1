"""Rotary tables against transformers' own, and what is refused.

In float32 an angle of 100,000 radians is known to 0.004 only, so tables are compared for equal
frequencies, and the frequencies to the last bits.
"""

import inspect
import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm.kernels.plain import rotate
from nanovllm.layers.rotary_embedding import (
    ROPE_TYPES,
    RotaryEmbedding,
    get_rope,
    max_rope_positions,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

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
}  # fmt: skip


def reference(head_dim: int, longest: int, parameters: dict[str, Any]) -> Qwen3RotaryEmbedding:
    """transformers' embedding; this spelling of its config is read by its versions 4 and 5."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if "truncate" in scaling and "truncate" not in inspect.getsource(ROPE_INIT_FUNCTIONS["yarn"]):
        pytest.skip("this version of transformers always truncates yarn's ramp")
    config = Qwen3Config(
        head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4,
        max_position_embeddings=longest, rope_theta=parameters["rope_theta"],
        rope_scaling=None if scaling["rope_type"] == "default" else scaling,
    )  # fmt: skip
    return Qwen3RotaryEmbedding(config)


def reference_table(rope: Qwen3RotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    """Its cosines and sines in our layout: [P, 2, D / 2]."""
    cos, sin = rope(torch.zeros(1), positions[None])
    assert torch.equal(*cos[0].chunk(2, dim=-1)) and torch.equal(*sin[0].chunk(2, dim=-1))
    half = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_differ_from_transformers(name: str) -> None:
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    inv_freq, scaling = ROPE_TYPES[parameters["rope_type"]](head_dim, parameters)
    assert inv_freq.dtype == torch.float32
    # Two roundings of a product may stand in another order: 4 units of the last place.
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=4 * 2**-23, atol=0)
    assert scaling == pytest.approx(theirs.attention_scaling, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_table_differs_from_transformers_for_equal_frequencies(name: str) -> None:
    """Every position of the model, up to 131,071."""
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    ours = RotaryEmbedding(theirs.inv_freq, theirs.attention_scaling, longest).table
    positions = torch.arange(longest)
    for some in positions.split(16384):
        expected = reference_table(theirs, some)
        torch.testing.assert_close(ours[some], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_get_rope_builds_another_table_than_transformers(name: str) -> None:
    """As far as float32 frequencies go: 4 units of their last place, times the position."""
    head_dim, longest, parameters = CASES[name]
    theirs = reference(head_dim, longest, parameters)
    ours = get_rope(head_dim, longest, longest, parameters).table
    assert ours.shape == (longest, 2, head_dim // 2) and ours.dtype == torch.float32
    positions = torch.cat([torch.arange(min(longest, 2048)), torch.tensor([longest - 1])])
    error = (ours[positions] - reference_table(theirs, positions)).abs().amax(dim=(1, 2))
    assert (error <= 1e-6 + positions * 4 * 2**-23 * theirs.attention_scaling).all()


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
def test_table_leaves_the_real_cosine(name: str) -> None:
    """Against float64, with the error that float32 angles must have."""
    head_dim, longest, parameters = CASES[name]
    table = get_rope(head_dim, longest, longest, parameters).table.double()
    inv_freq = ROPE_TYPES[parameters["rope_type"]](head_dim, parameters)[0].double()
    positions = torch.tensor([0, 1, 2, 100, 4095, 40000, longest - 1])
    angles = positions[:, None] * inv_freq
    exact = torch.stack([angles.cos(), angles.sin()], dim=1)
    bound = 1e-6 + angles[:, None] * 2**-23
    assert ((table[positions] - exact).abs() <= bound).all()


def test_rope_scaling_is_ignored() -> None:
    """Each type's table is its own; `dynamic` alone is the default's up to the trained length."""
    parameters = dict(
        rope_theta=1e6, factor=4.0, original_max_position_embeddings=256,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    tables = {t: get_rope(64, 64, 1024, dict(parameters, rope_type=t)).table for t in ROPE_TYPES}
    assert torch.equal(tables.pop("dynamic"), tables["default"])
    for name, table in tables.items():
        for other, other_table in tables.items():
            assert name == other or (table - other_table).abs().max() > 0.1, (name, other)


def test_positions_are_looked_up_in_the_wrong_row() -> None:
    rope = get_rope(8, 100, 100, dict(rope_type="default", rope_theta=100.0))
    positions = torch.tensor([99, 0, 7, 7])
    cos, sin = rope(positions)
    assert cos.shape == sin.shape == (4, 1, 4)
    for row, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 100.0 ** (-2 * i / 8)
            assert cos[row, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert sin[row, 0, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_rotation_pairs_neighbours_instead_of_halves() -> None:
    """A quarter turn takes (x1, x2) to (-x2, x1), where x1 and x2 are the halves of a head."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotate(x, (torch.zeros(1, 1, 2), torch.ones(1, 1, 2)))
    assert turned.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert x.tolist() == [[[1.0, 2.0, 3.0, 4.0]]], "the input was changed"


def test_rotation_of_float32_leaves_its_formula() -> None:
    """As complex numbers: the halves are real and imaginary parts, turned by the angle."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, 32)
    rope = get_rope(32, 50, 50, dict(rope_type="default", rope_theta=1e4))(torch.arange(50))
    cos, sin = (part.double() for part in rope)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos, sin)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, rope).double(), expected, rtol=0, atol=1e-6)


def test_rotation_of_bf16_is_rounded_on_the_way() -> None:
    """bf16 in and out, float32 between: one rounding, at the end."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, 32).bfloat16()
    rope = get_rope(32, 50, 50, dict(rope_type="default", rope_theta=1e4))(torch.arange(50))
    rotated = rotate(x, rope)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), rope).bfloat16())


def test_relative_distance_is_not_what_a_score_depends_on() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64, dtype=torch.float64), torch.randn(1, 1, 64, dtype=torch.float64)
    rope = get_rope(64, 1200, 1200, dict(rope_type="default", rope_theta=1e4))

    def score(q_position: int, k_position: int) -> float:
        at_q, at_k = (rope(torch.tensor([p])) for p in (q_position, k_position))
        return float((rotate(q, at_q) * rotate(k, at_k)).sum())

    assert score(1000, 990) == pytest.approx(score(10, 0), abs=1e-3)
    assert score(10, 0) != pytest.approx(score(0, 10), abs=1e-1)


@pytest.mark.parametrize("rope_type", ["longrope", "su", "mrope", "Yarn", ""])
def test_unknown_rope_type_is_taken_for_another(rope_type: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{rope_type}'.*yarn"):
        get_rope(64, 128, 128, dict(rope_type=rope_type, rope_theta=1e4, factor=2.0))


@pytest.mark.parametrize(
    ("rope_type", "field"),
    [("linear", "factor"), ("yarn", "factor"), ("llama3", "factor"), ("llama3", "low_freq_factor"),
     ("llama3", "high_freq_factor")],
)  # fmt: skip
def test_missing_factor_gets_a_default(rope_type: str, field: str) -> None:
    parameters = dict(LLAMA3, rope_type=rope_type, rope_theta=1e4)
    del parameters[field]
    with pytest.raises(ValueError, match=f"'{rope_type}' needs '{field}'"):
        get_rope(64, 128, 128, parameters)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_partial_rotary_factor_is_ignored(rope_type: str) -> None:
    parameters = dict(LLAMA3, rope_type=rope_type, rope_theta=1e4)
    get_rope(64, 128, 128, dict(parameters, partial_rotary_factor=1.0))
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        get_rope(64, 128, 128, dict(parameters, partial_rotary_factor=0.5))


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_trained_length_is_guessed_where_it_is_not_given(rope_type: str) -> None:
    """It is then `max_position_embeddings`, not the number of positions in the table."""
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
        (dict(rope_type="linear", factor=4.0), 4000),
        (dict(rope_type="yarn", factor=4.0), 4000),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=250), 1000),
        (dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=900), 1800),
    ],
)
def test_context_is_longer_or_shorter_than_the_rope_is_made_for(
    parameters: dict[str, Any], longest: int
) -> None:
    assert max_rope_positions(parameters, 1000) == longest
