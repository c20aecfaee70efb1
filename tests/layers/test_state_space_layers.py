"""State spaces on several ranks, and blocks of one part or of two mixers side by side."""

from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import on_ranks
from torch import nn

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.layers.block import Norms
from nanovllm.layers.context import STATES, reading
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.mixer import Mixer, Ropes
from nanovllm.layers.one_part_block import OnePartBlock
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.scaled_state_space import ScaledStateSpace
from nanovllm.layers.side_by_side_block import Factors, SideBySideBlock
from nanovllm.layers.state_space import StateSpace
from nanovllm.layers.state_space_mixer import StateSpaceMixer

HIDDEN, TOKENS = 12, 5
FACTORS = [0.5, 2.0, 1.5, 0.7, 1.2]


def make_mixer(ranks: Ranks, space: StateSpace, scaled: bool) -> StateSpaceMixer:
    """A mixer with the same values on every number of ranks, and slots for states."""
    make = Build(ranks, PLAIN_FORMATS, 16)
    if scaled:
        mixer: StateSpaceMixer = ScaledStateSpace(make, HIDDEN, space, 1e-5, FACTORS, 0.8)
    else:
        mixer = StateSpaceMixer(make, HIDDEN, space, 1e-5)
    generator = torch.Generator().manual_seed(0)
    for name, param in sorted(mixer.named_parameters()):
        layer = mixer.get_submodule(name.rpartition(".")[0])
        assert isinstance(layer, Layer)
        whole = torch.randn(layer.whole_shape(param, None), generator=generator) * 0.5
        layer.weight_loader(param, whole, None)
    slots = [torch.zeros(TOKENS + 2, *shape) for shape, _ in mixer.cache.tensors]
    mixer.set_states(slots)
    return mixer


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("norm", ["gate first", "gate last", None])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_ranks_divide_heads_and_share_groups(groups: int, norm: str | None, scaled: bool) -> None:
    """Another group's B and C on a rank, or a mean over a rank's own channels, would show here."""
    space = StateSpace(
        num_heads=8, head_dim=3, num_groups=groups, state_size=4, width=3, in_bias=True,
        out_bias=True, norm=norm,
    )  # fmt: skip
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(TOKENS) + 1
    step = StateStep(torch.zeros(1, dtype=torch.int64), slots, np.array([0, TOKENS]))

    def run(ranks: Ranks) -> torch.Tensor:
        mixer = make_mixer(ranks, space, scaled)
        with reading({STATES: step}):
            return ranks.all_reduce(mixer.project(mixer.mix(x, {})))

    (alone,) = on_ranks(1, run)
    for size in (2, 4):
        for each in on_ranks(size, run):
            torch.testing.assert_close(each, alone, rtol=1e-5, atol=1e-6)
    assert alone.abs().max() > 0.1


class Times(Mixer):
    """Multiplies its input, and keeps what it has seen."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.weight = factor, nn.Identity()

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        return x * self.factor  # type: ignore[no-any-return]

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed + 1


class Double(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def norm() -> RMSNorm:
    return RMSNorm(4, 1e-6)


@pytest.mark.parametrize("rows", [None, [2], []])
def test_a_block_of_one_part(rows: list[int] | None) -> None:
    """The last one computes only some rows; of a feed-forward part, too."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    for part, expected in ((Times(3.0), 3 * norm()(x) + 1), (Double(), 2 * norm()(x))):
        block = OnePartBlock(("norm", norm()), part)
        out, residual = block(*block.enter(x, None), {}, chosen)
        if rows == []:
            assert out.shape == (0, 4)
            continue
        total = (x + expected) if chosen is None else (x + expected)[chosen]
        torch.testing.assert_close(out + residual, total)


@pytest.mark.parametrize("rows", [None, [0, 2]])
def test_two_mixers_side_by_side(rows: list[int] | None) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    norms = Norms(before_mixer=("norm_1", norm()), before_feed_forward=("norm_2", norm()))
    block = SideBySideBlock(
        Build(ALONE, PLAIN_FORMATS, 16), norms, Times(3.0), Times(5.0), Double(),
        factors=Factors(0.5, 0.25, 2.0),
    )  # fmt: skip
    out, residual = block(*block.enter(x, None), {}, chosen)
    normed = norm()(x)
    between = x + 0.25 * (1.5 * normed + 1) + 2.0 * (5 * normed + 1)
    total = between + 2 * norm()(between)
    torch.testing.assert_close(out + residual, total if chosen is None else total[chosen])
