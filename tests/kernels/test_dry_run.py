"""Dry runs: kernels are compiled in threads and not launched; what failed is raised by a launch."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import LIMIT

triton = pytest.importorskip("triton")
from nanovllm.kernels.triton.dry_run import Compilers, dry_run  # noqa: E402

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("dry_run_without_gpu.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each launch's thread, and whether it only compiles."""
    seen = []

    def run(self: Any, *, warmup: bool) -> None:
        seen.append((threading.current_thread().name, warmup))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return seen


def launch() -> None:
    triton.JITFunction.run(object(), warmup=False)


def test_only_the_calling_thread_launches_nothing(launches: list[tuple[str, bool]]) -> None:
    def call() -> None:
        launch()
        other = threading.Thread(target=launch, name="other")
        other.start()
        other.join()

    dry_run(call, 1, CPU)
    launch()
    here = threading.current_thread().name
    assert launches == [(here, True), ("other", False), (here, False)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_of_the_call_kernels_are_launched(
    error: type[BaseException], launches: list[tuple[str, bool]]
) -> None:
    def call() -> None:
        raise error("of the call")

    with pytest.raises(error, match="of the call"):
        dry_run(call, 1, CPU)
    launch()
    dry_run(launch, 1, CPU)
    assert [is_dry for _, is_dry in launches] == [False, True]


@pytest.mark.usefixtures("launches")
def test_new_tensors_hold_zeros() -> None:
    """A kernel that is not launched writes no ids: PyTorch's would read tokens out of bounds."""
    made: list[torch.Tensor] = []

    def call() -> None:
        like = torch.ones(5)
        made.extend((torch.empty(1 << 10, dtype=torch.long), torch.empty_like(like)))
        made.extend((like.new_empty(3, 4), torch.empty_strided((2, 2), (2, 1))))
        assert like.sum() == 5

    torch.full((1 << 10,), 7)  # freed: memory that is likely to be found again
    dry_run(call, 1, CPU)
    assert len(made) == 4
    assert not any(part.any() for part in made)


def test_a_kernel_in_the_making_is_found_by_the_next_launch() -> None:
    """Otherwise every launch of a dry run would hash the kernel's source again (Triton 3.6)."""
    found: list[Any] = []
    with ThreadPoolExecutor(1) as pool, Compilers(pool) as compilers:
        made = compilers.submit("key", lambda: "compiled", found.append)
        assert found[:1] == [made]
    assert found == [made, "compiled"]


@pytest.mark.slow
def test_kernels_are_compiled_once_in_threads_that_end(tmp_path: Path) -> None:
    """For a GPU that is absent; so are launchers, whose errors are left to the launches."""
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, stdout=subprocess.PIPE, check=True, timeout=LIMIT
    )
    found = json.loads(done.stdout)
    assert found.pop("error").endswith("it is broken")
    assert found == {
        "compiled": ["CompiledKernel", "CompiledKernel"], "in_threads": True, "zeros": True,
        "imports_pytorchs_compiler": False, "launchers_in_threads": True,
        "launches_again": True, "threads_left": 0,
    }  # fmt: skip
