"""Fair steps: how long running sequences wait for a token, and short prompts for a long one."""

from collections.abc import Callable
from typing import Any

import pytest
from drafts import Eager, RandomProposer
from test_scheduler import add, drain, fresh, make_scheduler, step

from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.engine.requests.logprobs import Logprobs
from nanovllm.engine.requests.report_limit import ReportLimit
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.schedule.fairness import LEAST, PART
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

MOST_WAITS = {"fair": 0, "mixed": 0, "prefill-first": 3}  # steps, as docs/scheduling.md says


class Unmixed(Drafting):
    """The device's drafts, without any: steps do not mix prompts and decodes."""

    fits_mixed_steps = False


Arrivals = Callable[[Scheduler, int], None]


def long_prompts(scheduler: Scheduler, number: int) -> None:
    if number % 4 == 0:
        add(scheduler, fresh(150), max_tokens=3)


def whole_steps(scheduler: Scheduler, number: int) -> None:
    add(scheduler, fresh(32), max_tokens=5)


def small_ones(scheduler: Scheduler, number: int) -> None:
    add(scheduler, fresh(1 + number % 7), max_tokens=1 + number % 5)


def urgent_ones(scheduler: Scheduler, number: int) -> None:
    add(scheduler, fresh(40), max_tokens=2, priority=-number)


@pytest.mark.parametrize("num_blocks", [1000, 60])
@pytest.mark.parametrize("drafts", ["none", "of the host", "of the device"])
@pytest.mark.parametrize("arrive", [long_prompts, whole_steps, small_ones, urgent_ones])
@pytest.mark.parametrize("scheduling", MOST_WAITS)
def test_a_running_sequence_gets_tokens_whatever_arrives(
    scheduling: str, arrive: Arrivals, drafts: str, num_blocks: int
) -> None:
    """Its wait is bounded in steps, unless it is preempted: it is not running then."""
    drafting, most = Drafting(), MOST_WAITS[scheduling]
    if drafts == "of the host":
        drafting = HostDrafting(RandomProposer(0, 60), 3, Eager)
    elif drafts == "of the device":
        drafting, most = Unmixed(), 1 if scheduling == "fair" else most
    scheduler = make_scheduler(
        num_blocks, drafting=drafting, scheduling=scheduling, max_num_batched_tokens=32,
        max_num_seqs=16,
    )  # fmt: skip
    for _ in range(2):
        add(scheduler, fresh(5), max_tokens=1000, max_model_len=200)
    waits: dict[Sequence, int] = {}
    for number in range(80):
        could = {seq: len(seq.token_ids) for seq in scheduler.running if not seq.is_prefilling}
        arrive(scheduler, number)
        step(scheduler)
        stuck = [s for s, length in could.items() if s.num_tokens == length and s.room]
        waits = {seq: waits.get(seq, 0) + 1 for seq in stuck}
        assert max(waits.values(), default=0) <= most


def test_prompts_get_few_tokens_while_sequences_wait() -> None:
    """Else a token of a stream could wait for 16,384 tokens of others' prompts."""
    scheduler = make_scheduler(num_blocks=9000, scheduling="fair", max_num_batched_tokens=4096)
    first, second = (add(scheduler, fresh(5000), max_tokens=9) for _ in range(2))
    assert step(scheduler) == [(first, 4096)], "nothing waits"
    assert step(scheduler) == [(first, 904), (second, 3192)]
    assert step(scheduler) == [(first, 1), (second, 4096 // PART)]
    assert step(scheduler) == [(first, 1), (second, 5000 - 3192 - 4096 // PART)]
    small = make_scheduler(num_blocks=9000, scheduling="fair", max_num_batched_tokens=LEAST + 1)
    other = add(small, fresh(3), max_tokens=9)
    step(small)
    long = add(small, fresh(1000))
    assert step(small) == [(other, 1), (long, LEAST)]
    assert step(small) == [(other, 1), (long, LEAST)]


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """They share its steps, and it gets all that they leave."""
    scheduler = make_scheduler(num_blocks=9000, scheduling="fair", max_num_batched_tokens=200)
    long = add(scheduler, fresh(2000), max_tokens=1)
    assert step(scheduler) == [(long, 200)], "it is alone"
    short, other = add(scheduler, fresh(30), max_tokens=1), add(scheduler, fresh(40), max_tokens=1)
    assert step(scheduler) == [(long, 130), (short, 30), (other, 40)]
    many = [add(scheduler, fresh(60), max_tokens=1) for _ in range(3)]
    assert step(scheduler) == [(long, 100), (many[0], 60), (many[1], 40)]
    assert step(scheduler) == [(long, 120), (many[1], 20), (many[2], 60)]
    assert step(scheduler) == [(long, 200)]


def test_long_prompts_wait_for_each_other() -> None:
    """If all of them advanced together, the first one would end late, and the last no sooner."""
    scheduler = make_scheduler(num_blocks=9000, scheduling="fair", max_num_batched_tokens=200)
    first, second = (add(scheduler, fresh(500), max_tokens=1) for _ in range(2))
    assert [step(scheduler) for _ in range(3)] == [
        [(first, 200)], [(first, 200)], [(first, 100), (second, 100)]
    ]  # fmt: skip


def test_a_long_prompt_is_not_halved_for_prompts_that_cannot_begin() -> None:
    """There is no place for them."""
    scheduler = make_scheduler(scheduling="fair", max_num_batched_tokens=20, max_num_seqs=1)
    long, _ = add(scheduler, fresh(60), max_tokens=1), add(scheduler, fresh(5), max_tokens=1)
    assert [step(scheduler) for _ in range(3)] == [[(long, 20)]] * 3
    drain(scheduler)
    scheduler = make_scheduler(num_blocks=16, scheduling="fair", max_num_batched_tokens=20)
    long, _ = add(scheduler, fresh(60), max_tokens=1), add(scheduler, fresh(9), max_tokens=1)
    assert [step(scheduler) for _ in range(3)] == [[(long, 20)]] * 3
    drain(scheduler)


def test_long_prompts_run_in_order_if_no_short_one_can_begin() -> None:
    """The one that waits has no place, and so none of the others leaves tokens to it."""
    scheduler = make_scheduler(scheduling="fair", max_num_batched_tokens=20, max_num_seqs=2)
    first, second = (add(scheduler, fresh(60), max_tokens=1) for _ in range(2))
    add(scheduler, fresh(5), max_tokens=1)
    assert step(scheduler) == [(first, 15), (second, 5)], "there is a place for one"
    assert [step(scheduler) for _ in range(2)] == [[(first, 20)]] * 2
    drain(scheduler)


def test_what_short_prompts_leave_is_not_for_reports() -> None:
    """Log-probabilities of prompts have a limit of their own."""
    scheduler = make_scheduler(num_blocks=9000, scheduling="fair", max_num_batched_tokens=100)
    long = add(scheduler, fresh(500), max_tokens=1)
    long.parts.logprobs = Logprobs(500, ReportLimit(10))
    short = add(scheduler, fresh(30), max_tokens=1)
    assert step(scheduler) == [(long, 10), (short, 30)]


@pytest.mark.parametrize("scheduling", MOST_WAITS)
def test_a_threshold_bounds_each_prompt_of_a_step(scheduling: str) -> None:
    """So a step has several: vLLM's `long_prefill_token_threshold`."""
    scheduler = make_scheduler(
        scheduling=scheduling, max_num_batched_tokens=32, long_prefill_token_threshold=10
    )
    a, b, c = (add(scheduler, fresh(n), max_tokens=1) for n in (25, 12, 4))
    assert step(scheduler) == [(a, 10), (b, 10), (c, 4)]
    assert step(scheduler) == [(a, 10), (b, 2)]
    assert step(scheduler) == [(a, 5)]


def test_a_threshold_is_for_prompts_only() -> None:
    """Also of sequences that are computed again; all others get their tokens."""
    scheduler = make_scheduler(long_prefill_token_threshold=1, enable_prefix_caching=False)
    seqs = [add(scheduler, fresh(3), max_tokens=4) for _ in range(5)]
    for _ in range(3):
        assert step(scheduler) == [(seq, 1) for seq in seqs]
    assert step(scheduler) == [(seq, 1) for seq in seqs]
    scheduler.preempt(seqs[-1])
    assert step(scheduler) == [(seqs[-1], 1)]
    drain(scheduler)
    assert all(seq.status is SequenceStatus.FINISHED for seq in seqs)


@pytest.mark.parametrize("scheduling", MOST_WAITS)
def test_without_fair_steps_prompts_run_in_order(scheduling: str) -> None:
    """Throughput does not depend on the order, and a batch has no one who waits."""
    options: dict[str, Any] = dict(scheduling=scheduling, max_num_batched_tokens=20)
    scheduler = make_scheduler(**options)
    long, short = add(scheduler, fresh(30), max_tokens=1), add(scheduler, fresh(6), max_tokens=1)
    expected = [(long, 14), (short, 6)] if scheduling == "fair" else [(long, 20)]
    assert step(scheduler) == expected
