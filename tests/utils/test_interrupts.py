"""Ctrl-C waits for the end of a block, and then does what the caller wants it to do."""

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
    """A block that is interrupted some times, and does one thing more."""
    with holding_interrupts():
        for _ in range(times):
            interrupt()
        then()


def test_the_block_is_left_in_its_middle() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, lambda: done.append(1))
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_waits_too() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, lambda: done.append(1))
    assert not done


def test_one_is_lost_when_the_block_raises() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(1, lambda: {}["missing"])
    assert isinstance(caught.value.__context__, KeyError)


def test_the_callers_own_handler_is_left_out() -> None:
    heard: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with holding_interrupts():
        interrupt()
        assert not heard
        interrupt()
        assert len(heard) == 1
    assert len(heard) == 2


def test_a_signal_that_the_caller_ignores_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with holding_interrupts():
        for _ in range(3):
            interrupt()
