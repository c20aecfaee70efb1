"""Hidden states that a request keeps, and what is sent of them to another process."""

import pickle

import numpy as np
import pytest

from nanovllm.vectors.generated_states import GeneratedStates
from nanovllm.vectors.pooling import POOLINGS, KeptStates, Pooling

STATES = np.random.default_rng(0).standard_normal((5, 3), np.float32)


def filled(pooling: Pooling) -> KeptStates:
    """A pool of five tokens whose states have arrived in two parts."""
    pool = KeptStates(pooling, 5)
    for tokens in (range(2), range(2, 5)):
        wanted = range(max(tokens.start, pool.wanted.start), min(tokens.stop, pool.wanted.stop))
        if wanted:
            part = STATES[wanted.start : wanted.stop]
            pool.add_states(wanted, part.sum(axis=0, keepdims=True) if pool.adds_up else part)
    assert not pool.wanted
    return pool


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pool_is_sent_without_tensors(pooling: Pooling) -> None:
    """PyTorch takes a tenth of a millisecond to pickle one, and more to load it."""
    pool = filled(pooling)
    data = pickle.dumps(pool, pickle.HIGHEST_PROTOCOL)
    assert b"torch" not in data
    mean = STATES.mean(axis=0)
    expected = {"last": STATES[-1], "cls": STATES[0], "mean": mean, "all": STATES}[pooling]
    for each in (pool, pickle.loads(data)):
        assert each.result.dtype == np.float32
        assert np.allclose(each.result, expected, atol=1e-6)
        assert each.result.flags.writeable, "a caller of `encode` may change it"


def test_states_of_tokens_are_sent_without_tensors() -> None:
    states = GeneratedStates(3, keeps_prompt=True)
    states.add_states(range(2), STATES[:2])
    for index in (3, 4):
        states.add_drawn(index, STATES[index - 1 : index])
    data = pickle.dumps(states, pickle.HIGHEST_PROTOCOL)
    assert b"torch" not in data
    for each in (states, pickle.loads(data)):
        assert np.array_equal(each.prompt.numpy(), STATES[:3])
