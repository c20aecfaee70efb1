"""Samples of one request leave memory to other requests, where a few of them fill the pool."""

import pytest
from test_sample_limit import SHARE, Requests, num_running

from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

NUM_BLOCKS = 30  # of 4 tokens
MANY = 10 * SHARE


def crowded(scheduling: str = "fair") -> tuple[Requests, list[Sequence]]:
    """Samples that fill the pool: each has 8 blocks at its end, next to 10 that they share."""
    requests = Requests(NUM_BLOCKS, scheduling=scheduling)
    samples = requests.add(41, MANY, max_tokens=31)
    for _ in range(25):
        requests.step()
    assert requests.scheduler.num_preemptions > 0 and num_running(samples) > 1
    return requests, samples


def steps_until_first(requests: Requests, seq: Sequence, most: int = 2000) -> int:
    """Run steps until a request has its first token; returns their number."""
    for number in range(most):
        if seq.num_tokens > seq.num_prompt_tokens:
            return number
        requests.step()
    raise AssertionError("it waits for the samples of another request")


@pytest.mark.parametrize("scheduling", ["fair", "prefill-first", "mixed"])
@pytest.mark.parametrize(("num_tokens", "most"), [(20, 8), (60, 40)])
def test_samples_give_memory_to_a_later_request(
    scheduling: str, num_tokens: int, most: int
) -> None:
    """It would wait until the last sample has begun: all are older.

    A large one has no room next to a single sample, and waits until that has ended.
    """
    requests, samples = crowded(scheduling)
    (chat,) = requests.add(num_tokens, max_tokens=10)
    assert steps_until_first(requests, chat) <= most
    assert num_running(samples) >= (num_tokens == 20), "the request goes on"
    requests.drain()
    assert all(seq.finish_reason == "length" for seq in [*samples, chat])


def test_samples_go_on_next_to_many_later_requests() -> None:
    """Each gets its first token soon, and all samples finish meanwhile."""
    requests, samples = crowded()
    waits = []
    while any(seq.finish_reason is None for seq in samples):
        (chat,) = requests.add(20, max_tokens=10)
        waits.append(steps_until_first(requests, chat))
        for _ in range(20):
            if not requests.scheduler.is_finished():
                requests.step()
        assert len(waits) < 300
    assert max(waits) <= 20
    requests.drain()


def test_later_priorities_get_no_memory_of_samples() -> None:
    """They wait until the samples have ended, in any case."""
    requests, samples = crowded()
    (chat,) = requests.add(20, max_tokens=10, priority=1)
    while any(seq.status is not SequenceStatus.RUNNING for seq in samples if not seq.finish_reason):
        assert chat.status is SequenceStatus.WAITING
        requests.step()
    requests.drain()


def test_samples_give_memory_to_samples_of_others() -> None:
    """Two requests of many samples advance next to each other."""
    requests, samples = crowded()
    others = requests.add(41, MANY, max_tokens=31)
    assert steps_until_first(requests, others[0]) <= 40
    for _ in range(200):
        requests.step()
    ended = [sum(seq.finish_reason is not None for seq in each) for each in (samples, others)]
    assert min(ended) > 3, "one waits for all of the other"
    requests.drain()


def test_samples_keep_memory_that_nobody_needs() -> None:
    """A request that has room begins next to them, and none is preempted."""
    large = Requests(400, scheduling="fair")
    samples = large.add(41, MANY, max_tokens=31)
    large.add(3, max_tokens=50)
    for _ in range(5):
        large.step()
    (chat,) = large.add(3, max_tokens=5)
    assert steps_until_first(large, chat) <= 2
    assert num_running(samples) == SHARE and large.scheduler.num_preemptions == 0
    large.drain()
