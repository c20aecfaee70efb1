"""Compiling kernels before their launches: where, in how many threads, and for a trial."""

import sys

import pytest
import torch

from nanovllm.layers import compiling
from nanovllm.layers.backends import choice
from nanovllm.layers.compiling import MOST_THREADS, compile_in_threads

pytest.importorskip("triton")


@pytest.mark.parametrize("system", ["Linux", "another"])
@pytest.mark.parametrize("allowed", [1, 3, sys.maxsize])
def test_no_more_threads_than_allowed_cores(
    allowed: int, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other systems do not list the cores of a process."""
    runs = []

    def dry_run(call: object, num_threads: int, device: torch.device) -> None:
        runs.append((call, num_threads, device.type))

    monkeypatch.setattr("nanovllm.kernels.triton.dry_run.dry_run", dry_run)
    monkeypatch.setattr(compiling, "allowed_cores", lambda: allowed)
    if system == "Linux":
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(99)))
    else:
        monkeypatch.delattr("os.sched_getaffinity")
        monkeypatch.setattr("os.cpu_count", lambda: 99)
    compile_in_threads(dry_run, torch.device("cuda"))  # type: ignore[arg-type]
    assert runs == [(dry_run, min(allowed, MOST_THREADS), "cuda")]


@pytest.mark.parametrize("missing", [False, True])
def test_without_a_gpu_or_triton_nothing_is_called(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "nanovllm.kernels.triton.dry_run", None)
    compile_in_threads(lambda: pytest.fail("called"), torch.device("cuda" if missing else "cpu"))


def test_the_trial_of_a_backend_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the dry run is the backend's: without a C compiler, Triton fails there."""
    order: list[str] = []

    def compile_first(call: object, device: torch.device) -> None:
        order.append(f"compiled on {device}")
        assert call is build

    def build() -> int:
        order.append("built")
        return 5

    monkeypatch.setattr(choice, "compile_in_threads", compile_first)
    assert choice.tried("triton", build, torch.device("cuda")) == 5
    assert order == ["compiled on cuda", "built"]

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(choice, "compile_in_threads", fail)
    with pytest.raises(ValueError, match=r"'triton' does not work here \(RuntimeError: no compi"):
        choice.tried("triton", build, torch.device("cuda"))
