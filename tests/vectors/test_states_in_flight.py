"""States that have arrived on the host, and what sequences keep of them."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.vectors.generated_states import GeneratedStates
from nanovllm.vectors.hidden_states import (
    DrawnStates,
    InFlight,
    Pooled,
    deliver_drawn,
    deliver_states,
)
from nanovllm.vectors.pooling import KeptStates

DTYPES = (torch.bfloat16, torch.float32)
STATES = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Seq(NamedTuple):
    """A sequence that keeps states."""

    parts: SequenceParts


def downloaded(dtype: torch.dtype, size: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """States as they have arrived, and what should be kept of them when they are overwritten."""
    states = STATES[:size].to(dtype)
    return states, states.to(torch.float32, copy=True).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [2, 1, 3]], ids=str)
def test_states_go_to_their_pools(dtype: torch.dtype, sizes: list[int]) -> None:
    """As copies: later steps download to the same memory."""
    pools = [KeptStates("all", size) for size in sizes]
    states, expected = downloaded(dtype, sum(sizes))
    seq: Any = None
    deliver_states(InFlight([Pooled(seq, pool, pool.wanted) for pool in pools], states))
    states.zero_()
    assert np.array_equal(np.concatenate([pool.result for pool in pools]), expected)
    for pool, size in zip(pools, sizes, strict=True):
        assert not pool.wanted and pool.result.dtype == np.float32
        base = pool.result.base
        assert base is None or base.nbytes == size * 3 * 4, "none keeps the memory of all"


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_states_go_to_their_tokens(dtype: torch.dtype) -> None:
    seqs: list[Any] = [Seq(SequenceParts(keeper=GeneratedStates(1, True))) for _ in range(3)]
    states, expected = downloaded(dtype, 3)
    deliver_drawn(DrawnStates([(seq, 1) for seq in seqs], states))
    states.zero_()
    assert np.array_equal(torch.cat([seq.parts.keeper.prompt for seq in seqs]).numpy(), expected)
