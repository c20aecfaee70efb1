"""Progress bars as a terminal receives them."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reference import make_llm
from tqdm import tqdm
from waiting import LIMIT, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.command.main import main
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.requests.measures import StepCounter
from nanovllm.engine.requests.progress import Activity

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = [SamplingParams(max_tokens=1)] * 400
LONG = [SamplingParams(max_tokens=40, ignore_eos=True)] * 8


class Screen:
    """A pseudo-terminal in place of stderr; `drawn` has what it received."""

    def __init__(self, columns: int) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stderr = os.fdopen(writer, "w")
        self.drawn: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._reader, 1 << 16):
                self.drawn.append(data.decode())
        except OSError:  # the other end is closed
            os.close(self._reader)

    def close(self) -> None:
        self.stderr.close()
        self._thread.join(LIMIT)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in re.split(r"[\r\n]+", "".join(self.drawn)) if line]

    def wait_for_drawings(self, number: int) -> None:
        """Wait until as many more have come."""
        goal = len(self.drawn) + number
        wait_until("the bar stands still", lambda: len(self.drawn) >= goal)


@pytest.fixture
def screen_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Screen]]:
    screens = []

    def make(columns: int) -> Screen:
        screens.append(Screen(columns))
        monkeypatch.setattr(sys, "stderr", screens[-1].stderr)
        return screens[-1]

    yield make
    for screen in screens:
        screen.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(EMBEDDED_MODEL, max_num_seqs=64, max_model_len=256) as llm:
        yield llm


def slow_down(llm: LLM, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """When only the long requests are left, the third step lasts until the bar was drawn twice."""
    advance, steps = llm.advance, 0

    def slow() -> None:
        nonlocal steps
        advance()
        if len(llm.requests.unfinished) <= len(LONG):
            steps += 1
            if steps == 3:
                screen.wait_for_drawings(2)

    monkeypatch.setattr("nanovllm.engine.requests.progress.INTERVAL", 0.02)
    monkeypatch.setattr(llm, "advance", slow)


def test_the_bar_never_stands_still(
    llm: LLM, screen_of: Callable[[int], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a long step either, after a burst of quick requests, while none finishes."""
    screen, params = screen_of(80), [*QUICK, *LONG]
    slow_down(llm, screen, monkeypatch)
    threads = threading.active_count()
    llm.generate(["12+34="] * len(params), params)
    assert threading.active_count() == threads
    screen.close()
    assert max(map(len, screen.lines)) <= 79
    assert re.search(
        r"98%\|\W+\| 400/408 \[00:\d\d<.* tok/s out.*\]$", "\n".join(screen.lines), re.M
    )
    assert screen.lines[-1].startswith("Generating: 100%|")
    assert " 0.00" not in "\n".join(screen.lines)


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        (60, r" 98%\|[^|]{8,}\| 400/408 \[00:\d\d<00:00, \S+ tok/s out\]"),
        (80, r"Generating:  98%\|[^|]{8,}\| 400/408 \[00:\d\d<00:00, \S+ tok/s out, avg \S+\]"),
        (
            120,
            r"Generating:  98%\|[^|]{8,}\| 400/408 \[.*tok/s out, avg \S+, \S+ in, 8 running,"
            r" KV \d+%\]",
        ),
    ],
)  # fmt: skip
def test_a_line_fits_the_terminal(
    llm: LLM, screen_of: Callable[[int], Screen], columns: int, pattern: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The bar keeps eight columns; notes that do not fit are left out, the last ones first."""
    screen, params = screen_of(columns), [*QUICK, *LONG]
    slow_down(llm, screen, monkeypatch)
    llm.generate(["12+34="] * len(params), params)
    screen.close()
    assert max(map(len, screen.lines)) <= columns - 1
    assert any(re.fullmatch(pattern, line) for line in screen.lines), screen.lines
    assert len({line.count("|") for line in screen.lines}) == 1


def test_a_rate_without_tokens_is_left_out(llm: LLM) -> None:
    activity = Activity(llm)
    assert list(activity.notes()) == ["KV 0%"]
    llm.generate("12+34=", QUICK[0], use_tqdm=False)
    assert re.fullmatch(r"\S+ tok/s in, KV 0%", ", ".join(activity.notes()))
    activity = Activity(llm)
    llm.add_request("12+34=", LONG[0])
    llm.step()
    list(activity.notes())
    for _ in range(30):
        llm.step()
        list(activity.notes())
    notes = list(activity.notes())
    assert re.fullmatch(r"\S+ tok/s out, avg \S+, 1 running, KV \d%", ", ".join(notes))
    assert list(activity.notes()) == notes, "no step, other rates"
    while not llm.is_finished():
        llm.step()


def test_the_average_is_of_the_whole_run_and_all_its_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate beside it is of decode steps alone, and of the last drawings."""
    clock = iter((10.0, 14.0, 18.0))
    monkeypatch.setattr("nanovllm.engine.requests.progress.time.perf_counter", lambda: next(clock))
    counter = StepCounter(decode_tokens=5)  # of an earlier run
    engine: Any = SimpleNamespace(counter=counter, stats=llm.stats)
    activity = Activity(engine)
    for _ in range(2):
        counter.decode_tokens += 100
        counter.decode_seconds += 0.5
        notes = list(activity.notes())
        assert notes[:2] == ["200 tok/s out", "avg 25.0"]
    assert list(activity.notes()) == notes, "no step has ended"


def test_drafts_show_the_tokens_of_a_step() -> None:
    ngram = {"method": "ngram"}
    with make_llm(EMBEDDED_MODEL, max_model_len=256, speculative_config=ngram) as llm:
        activity = Activity(llm)
        params = SamplingParams(
            temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=[7]
        )
        llm.generate("12+34=", params, use_tqdm=False)
        notes = ", ".join(activity.notes())
    shown = re.fullmatch(r"\S+ tok/s out, avg \S+, \S+ in, (\d\.\d) tok/step, KV 0%", notes)
    assert shown is not None and 3 < float(shown[1]) <= 5, notes


def test_an_interrupt_ends_the_bar_and_its_thread(
    llm: LLM, screen_of: Callable[[int], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, threads = screen_of(80), threading.active_count()

    def interrupted() -> None:
        screen.wait_for_drawings(1)
        raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.engine.requests.progress.INTERVAL", 0.02)
    monkeypatch.setattr(llm, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("12+34=", QUICK[0])
    assert threading.active_count() == threads
    monkeypatch.undo()
    assert llm.generate("12+34=", QUICK[0], use_tqdm=False)
    screen.close()
    assert screen.drawn[-1].endswith("\n")


def test_the_bar_of_a_batch(
    screen_of: Callable[[int], Screen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """It counts lines; those of an earlier run take no time."""
    monkeypatch.setattr("nanovllm.engine.requests.progress.INTERVAL", 0.02)
    lines = ['{"prompt": "1+1="}', '{"prompt": 5}']
    lines += ['{"prompt": "12+34=", "max_tokens": 60, "ignore_eos": true}'] * 4
    (tmp_path / "in").write_text("\n".join(lines))
    screen = screen_of(80)
    argv = ["run-batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main(argv) == 1
    screen.close()
    assert max(map(len, screen.lines)) <= 79
    pattern = r"Batch:  33%\|[^|]{8,}\| 2/6 \[00:\d\d<00:\d\d, 1 failed, \S+ tok/s out, .*\]"
    assert any(re.fullmatch(pattern, line) for line in screen.lines), screen.lines
    assert screen.lines[-1].startswith("Batch: 100%|")


def test_ctrl_c_while_a_bar_is_drawn_leaves_tqdms_lock_free(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is the process's: a later bar would wait for it forever."""
    drawn = tqdm.display

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return drawn(self, *args, **options)

    def take_lock() -> None:
        lock = tqdm.get_lock().mp_lock
        taken.append(lock.acquire(timeout=LIMIT))
        if taken[-1]:
            lock.release()

    taken: list[bool] = []
    with make_llm(model_dir) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(tqdm, "display", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3]] * 3, LONG[0])
        thread = threading.Thread(target=take_lock)
        thread.start()
        thread.join()
        assert taken == [True]
        assert llm.is_finished()
        assert len(llm.generate([[1, 2, 3]], LONG[0])) == 1


def test_an_engine_leaves_no_thread_of_a_bar() -> None:
    """tqdm starts one that watches its bars, also those that are hidden."""
    script = f"""
import threading
from nanovllm import LLM
with LLM({EMBEDDED_MODEL!r}) as llm:
    llm.generate("12+34=")
    print([thread.name for thread in threading.enumerate()])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "['MainThread']\n", done.stderr
