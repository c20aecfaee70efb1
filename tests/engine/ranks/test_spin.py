"""Ranks poll only where that has paid: else they keep cores from those that they wait for."""

import pytest

from nanovllm.engine.ranks import spin as spin_module
from nanovllm.engine.ranks.spin import BRIEF_SECONDS, Spin


def test_a_wait_polls_for_a_moment_after_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(spin_module, "perf_counter", lambda: clock[0])
    spin, polled = Spin(2.0), []
    for seconds in (1.0, 3.0, 5.0, 1.9, 0.5):
        polled.append(spin.begin() - clock[0])
        clock[0] += seconds
        spin.end()
    assert polled == pytest.approx([2.0, 2.0, BRIEF_SECONDS, BRIEF_SECONDS, 2.0], abs=1e-9)
