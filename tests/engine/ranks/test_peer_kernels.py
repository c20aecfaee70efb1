"""Setting up the kernels that exchange rows between GPUs: all ranks use them, or none does."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm.engine.ranks import peers as module
from nanovllm.engine.ranks.nccl_ranks import NcclRanks
from nanovllm.engine.ranks.peers import connect_peers
from nanovllm.layers.ranks import Ranks

STEPS = ["allocate", "open", "launch", "sum"]


class OneOfTwo(Ranks):
    """The other rank agrees to every step except one."""

    def __init__(self, refused: str | None) -> None:
        super().__init__(0, 2)
        self.refused, self.steps = refused, list(STEPS)

    def minimum(self, number: int) -> int:
        return min(number, int(self.steps.pop(0) != self.refused))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Steps:
    """What `Peers` does, one step of which may fail. `sums` are the kernels."""

    def __init__(self, failing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.taken, self.sums = failing, [], object()
        self.end: Any = None
        monkeypatch.setattr(module, "_launched_alone", lambda sums: self.take("launch", sums))
        monkeypatch.setattr(module, "_tried", lambda sums, _: self.take("sum", sums))

    def take(self, step: str, result: Any) -> Any:
        self.taken.append(step)
        if step == self.failing:
            raise RuntimeError(f"cannot {step}")
        return result

    def allocate(self) -> torch.Tensor:
        return self.take("allocate", torch.zeros(2, 64))

    def open(self, handles: torch.Tensor) -> Any:
        assert handles.shape == (2, 64)
        return self.take("open", self.sums)


@pytest.mark.parametrize("step", [*STEPS, None])
@pytest.mark.parametrize("where", ["here", "on the other rank"])
def test_no_rank_uses_kernels_that_do_not_work_on_all(
    step: str | None, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks take the same steps, and stop after the first one that fails on any of them."""
    here = where == "here"
    steps: Any = Steps(step if here else None, monkeypatch)
    ranks = OneOfTwo(None if here else step)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        sums = connect_peers(ranks, steps)
    assert (sums is steps.sums) == (step is None)
    last = len(STEPS) if step is None else STEPS.index(step) + 1
    assert steps.taken == STEPS[:last] and ranks.steps == STEPS[last:]
    assert (f"cannot {step}" in caplog.text) == (step is not None and here)


def test_kernels_are_tried_on_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which is the first one in a new process or thread."""
    current = [torch.device("cuda", 0)]
    tried = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(module, "Peers", lambda *_: tried.append(current[0]))
    monkeypatch.setattr(module, "connect_peers", lambda *_: tried.append(current[0]))
    ranks = NcclRanks(1, 2, torch.device("cuda", 1), address=0)
    ranks._connect_peers()
    assert tried == [torch.device("cuda", 1)] * 2
