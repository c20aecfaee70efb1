"""Hidden states that a request keeps, and what is sent of them to another process."""

import pickle

import pytest
import torch

from nanovllm.engine.requests.pool import POOLINGS, Pool, Pooling
from nanovllm.engine.requests.states import States

STATES = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def filled(pooling: Pooling) -> Pool:
    """A pool of five tokens whose states have arrived in two parts."""
    pool = Pool(pooling, 5)
    for tokens in (range(2), range(2, 5)):
        wanted = range(max(tokens.start, pool.wanted.start), min(tokens.stop, pool.wanted.stop))
        if wanted:
            part = STATES[wanted.start : wanted.stop]
            pool.add_states(wanted, part.float().sum(0, keepdim=True) if pool.adds_up else part)
    assert not pool.wanted
    return pool


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pool_is_sent_without_tensors(pooling: Pooling) -> None:
    """PyTorch takes a tenth of a millisecond to pickle one, and more to load it."""
    pool = filled(pooling)
    data = pickle.dumps(pool, pickle.HIGHEST_PROTOCOL)
    assert b"torch" not in data
    wide = STATES.float()
    expected = {"last": wide[-1], "cls": wide[0], "mean": wide.mean(0), "all": wide}[pooling]
    for each in (pool, pickle.loads(data)):
        assert each.result.dtype == torch.float32
        assert torch.allclose(each.result, expected, atol=1e-6)
        each.result.mul_(1)  # a caller may change it


def test_states_of_tokens_are_sent_without_tensors() -> None:
    states = States(3, keeps_prompt=True)
    states.add_states(range(2), STATES[:2])
    for index in (3, 4):
        states.add_drawn(index, STATES[index - 1])
    data = pickle.dumps(states, pickle.HIGHEST_PROTOCOL)
    assert b"torch" not in data
    for each in (states, pickle.loads(data)):
        assert torch.equal(each.prompt, STATES[:3].float())


def test_what_is_kept_is_a_copy() -> None:
    """The memory that a step downloads to is used by later ones."""
    downloaded = STATES.float()
    pool = Pool("last", 5)
    pool.add_states(range(4, 5), downloaded[4:])
    downloaded.zero_()
    assert torch.equal(pool.result, STATES[4].float())
