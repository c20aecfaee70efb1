"""Setting up the kernels that exchange rows between GPUs: all ranks use them, or none does."""

import logging
from typing import Any

import pytest
import torch

from nanovllm.engine.ranks import peers as module
from nanovllm.engine.ranks.peers import Peers, connect_peers
from nanovllm.engine.run.graphs import MAX_GRAPH_BATCH
from nanovllm.kernels.triton.ranks.all_reduce import MOST_BYTES, PeerKernels
from nanovllm.kernels.triton.ranks.exchange import REGIONS
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
    """What `Peers` does, one step of which may fail."""

    def __init__(self, failing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.taken = failing, []
        self.kernels = PeerKernels(0, 2, torch.zeros(3), torch.zeros(1))
        self.end: Any = None
        monkeypatch.setattr(module, "_launched_alone", lambda kernels: self.take("launch", kernels))
        monkeypatch.setattr(module, "_tried", lambda kernels, _: self.take("sum", kernels))
        monkeypatch.setattr(module, "_faster_bytes", lambda *_: 4096)

    def take(self, step: str, result: Any) -> Any:
        self.taken.append(step)
        if step == self.failing:
            raise RuntimeError(f"cannot {step}")
        return result

    def allocate(self) -> torch.Tensor:
        return self.take("allocate", torch.zeros(2, 64))

    def open(self, handles: torch.Tensor, kind: Any) -> Any:
        assert handles.shape == (2, 64)
        return self.take("open", self.kernels)


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
        kernels = connect_peers(ranks, steps, PeerKernels)
    assert (kernels is not None) == (step is None)
    assert kernels is None or kernels.most_bytes == 4096
    last = len(STEPS) if step is None else STEPS.index(step) + 1
    assert steps.taken == STEPS[:last] and ranks.steps == STEPS[last:]
    reason = f"cannot {step}" if here else "another rank cannot use them"
    assert (reason in caplog.text) == ("NCCL makes all sums" in caplog.text) == (step is not None)


@pytest.mark.parametrize(
    ("ours", "others_agree", "expected"),
    [
        ([1.0], [1], MOST_BYTES),
        ([3.0, 1.0], [1], MOST_BYTES // 4),
        ([1.0, 3.0, 3.0, 1.0], [0, 1, 1, 1], MOST_BYTES // 64),
        ([3.0] * 9, [1] * 9, 0),
    ],
)
def test_kernels_sum_what_they_sum_faster_than_nccl_on_all_ranks(
    ours: list[float], others_agree: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, kernels = OneOfTwo(None), PeerKernels(0, 2, torch.zeros(3), torch.zeros(1))
    agree, times = iter(others_agree), iter(ours)
    monkeypatch.setattr(ranks, "minimum", lambda number: min(number, next(agree, 1)))

    def milliseconds(call: Any, x: torch.Tensor) -> float:
        return 2.0 if call == ranks.all_reduce else next(times)

    monkeypatch.setattr(module, "_milliseconds", milliseconds)
    assert module._faster_bytes(ranks, kernels) == expected


def test_any_thread_ends_the_kernels_wait() -> None:
    """The flag was made in inference mode, which is a thread's own."""
    with torch.inference_mode():
        peers = Peers(0, 2, torch.device("cpu"))
    peers.end()
    assert peers._ended.item() == 1


def test_graphs_hold_no_more_rows_than_ranks_draw_together() -> None:
    assert MAX_GRAPH_BATCH <= REGIONS
