"""Ctrl-C is deferred to the end of a block, and then handled as the caller has set it."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm.utils.interrupts import holding_interrupts


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(times: int, then: Callable[[], Any]) -> None:
    """Run a block that is interrupted `times` times, and then calls `then`."""
    with holding_interrupts():
        for _ in range(times):
            interrupt()
        then()


def test_the_block_runs_to_its_end() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, lambda: done.append(1))
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_not_deferred() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, lambda: done.append(1))
    assert not done


def test_an_interrupt_is_raised_after_a_failed_block() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(1, lambda: {}["missing"])
    assert isinstance(caught.value.__context__, KeyError)


def test_the_callers_own_handler_is_called() -> None:
    heard: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with holding_interrupts():
        interrupt()
        assert not heard
        interrupt()
        assert len(heard) == 1
    assert len(heard) == 2


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with holding_interrupts():
        for _ in range(3):
            interrupt()
