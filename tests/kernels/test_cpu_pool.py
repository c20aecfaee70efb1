"""The pool of threads that the CPU's kernels share."""

import ctypes
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm.kernels.cpu import library as cpu_library
from nanovllm.kernels.cpu.compile import load
from nanovllm.kernels.cpu.library import SOURCE, library

pytestmark = pytest.mark.usefixtures("compiler")

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
Run = Callable[[int, int, Any], None]


@pytest.fixture(scope="module")
def run(compiler: None) -> Run:
    """Call a function with each number below a count, on some threads."""
    address = ctypes.c_void_p.in_dll(library(SOURCE), "pool").value
    assert address is not None
    start = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, CALL, ctypes.c_void_p)(address)

    def call(count: int, threads: int, work: Callable[[int], None]) -> None:
        start(count, threads, CALL(lambda _, index: work(index)), None)

    return call


def test_threads_that_would_share_a_core_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with OMP_PROC_BIND, which gives a core to each of OpenMP's threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert cpu_library._may_use(1) and not cpu_library._may_use(2)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cpu_library._may_use(2)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_each_call_is_made_once(count: int, threads: int, run: Run) -> None:
    for _ in range(30):
        seen: list[int] = []
        run(count, threads, seen.append)
        assert sorted(seen) == list(range(count))


def test_several_threads_take_part_and_all_calls_have_returned(run: Run) -> None:
    """Also after a pause, for which the threads sleep."""
    for pause in (0.0, 0.0, 0.05, 0.0, 0.05):
        time.sleep(pause)
        callers: list[int] = []
        all_there = threading.Barrier(4)

        def work(
            index: int, callers: list[int] = callers, all_there: threading.Barrier = all_there
        ) -> None:
            all_there.wait(LIMIT)
            callers.append(threading.get_ident())

        run(4, 4, work)
        assert len(callers) == 4 and len(set(callers)) == 4


def test_no_more_threads_take_part_than_are_asked_for(run: Run) -> None:
    for threads in (4, 2, 3):
        callers: set[int] = set()

        def work(index: int, callers: set[int] = callers) -> None:
            time.sleep(0.002)
            callers.add(threading.get_ident())

        run(20, threads, work)
        assert len(callers) <= threads


def test_jobs_of_several_threads_do_not_mix(run: Run) -> None:
    """A job that starts while another one runs is done by its own thread."""
    wrong: list[int] = []

    def start_jobs() -> None:
        for count in range(1, 60):
            seen: list[int] = []
            run(count, 3, seen.append)
            if sorted(seen) != list(range(count)):
                wrong.append(count)

    threads = [threading.Thread(target=start_jobs) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_job_inside_a_job_is_done_by_its_thread(run: Run) -> None:
    seen: list[int] = []
    run(3, 3, lambda outer: run(4, 3, lambda inner: seen.append(10 * outer + inner)))
    assert sorted(seen) == [10 * outer + inner for outer in range(3) for inner in range(4)]


RUNS = """
#include "runs.h"
#include <atomic>
#include <chrono>
// The first run waits for all others. Returns whether they came.
extern "C" bool all_others_come(int64_t count, int64_t threads, int64_t* lengths) {
    std::atomic<int64_t> done{0};
    std::atomic<bool> came{true};
    for_each_run(count, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) lengths[i] += last - first;
        done += last - first;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (first == 0 && done < count && came) came = std::chrono::steady_clock::now() < end;
    });
    return came;
}
"""


@pytest.fixture(scope="module")
def runs(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The function above, whose runs the pool's threads take."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("runs.h", "parallel.h"):
        shutil.copy(SOURCE.parent / name, folder)
    (folder / "test_runs.cpp").write_text(RUNS)
    made = load(folder / "test_runs.cpp")
    pool = ctypes.c_void_p.in_dll(library(SOURCE), "pool").value
    ctypes.c_void_p.in_dll(made, "shared_run").value = pool
    made.all_others_come.restype = ctypes.c_bool
    return made


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("count", [2, 7, 100, 2374])
def test_a_thread_takes_one_run_at_a_time(count: int, threads: int, runs: ctypes.CDLL) -> None:
    """No run has more than half of a thread's share, and the last ones are single numbers."""
    lengths = (ctypes.c_int64 * count)()
    assert runs.all_others_come(ctypes.c_int64(count), ctypes.c_int64(threads), lengths)
    found = list(lengths)
    assert found[0] == max(1, count // (2 * threads)) and found[-1] == 1
    assert found == sorted(found, reverse=True)


def _count_in_child(run: Run) -> None:
    seen: list[int] = []
    run(10, 4, seen.append)
    os._exit(0 if sorted(seen) == list(range(10)) else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_no_threads_and_still_ends_its_jobs(run: Run) -> None:
    run(4, 4, lambda index: None)
    child = multiprocessing.get_context("fork").Process(target=_count_in_child, args=(run,))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
