"""Progress bars: how many requests are done, and what the engine does meanwhile.

A thread draws the bar four times a second and ends with it. So the bar also moves while a step
takes long, and steps spend no time on it.
"""

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.utils.interrupts import Bar, make_bar

INTERVAL = 0.25  # seconds between two drawings
MAX_WAIT = 2.0  # seconds for a drawing to end: another bar of this process may hold tqdm's lock
WINDOW = 20  # drawings over which rates are measured
MIN_BAR = 8  # columns that notes leave to the bar itself
NARROW = 70  # a line with fewer columns has no description
LAYOUT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
WITHOUT_TOTAL = "{desc}: {n_fmt} [{elapsed}{postfix}]"


@contextlib.contextmanager
def progress_bar(
    engine: LLMEngine,
    total: int | None,
    description: str,
    first_notes: Callable[[], Iterable[str]] = tuple,
) -> Iterator[Bar]:
    """Show a bar on stderr during the block, which sets its `n`. `total` is None if unknown.

    After the bar come `first_notes` and then the engine's activity, as far as the line has room.
    """
    layout, activity = LAYOUT if total else WITHOUT_TOTAL, Activity(engine)
    with make_bar(total=total, desc=description, bar_format=layout, dynamic_ncols=True) as bar:

        def draw(refresh: bool = True) -> None:
            columns = bar.format_dict["ncols"]
            bar.desc = "" if total and columns and columns < NARROW else description
            bar.set_postfix_str(_fit(bar, [*first_notes(), *activity.notes()]), refresh)

        with _repeating(draw):
            yield bar
        draw(refresh=False)  # the end of the bar draws it


class Activity:
    """Describes what an engine does, in notes. Rates are over the last `WINDOW` drawings.

    After the rate of decode comes its average since the start, in which all time counts.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._seen = deque([dataclasses.replace(engine.counter)], maxlen=WINDOW)
        self._start, self._tokens_before = time.perf_counter(), engine.counter.decode_tokens
        self._average = 0.0

    def notes(self) -> Iterator[str]:
        """Rates of decode and prefill, running and waiting sequences, and how full the pool is.

        With drafts also the tokens of a sequence in a step.
        """
        now, stats = dataclasses.replace(self._engine.counter), self._engine.stats()
        before = self._seen[0]
        if now != self._seen[-1]:  # unchanged during a long step: keep the last rates
            self._seen.append(now)
            elapsed = time.perf_counter() - self._start
            self._average = (now.decode_tokens - self._tokens_before) / elapsed
        unit = " tok/s"  # once, with the first rate
        for kind, word in (("decode", "out"), ("prefill", "in")):
            tokens, seconds = (
                getattr(now, f"{kind}_{what}") - getattr(before, f"{kind}_{what}")
                for what in ("tokens", "seconds")
            )
            if tokens and seconds:
                yield f"{tqdm.format_sizeof(tokens / seconds)}{unit} {word}"
                unit = ""
                if kind == "decode":
                    yield f"avg {tqdm.format_sizeof(self._average)}"
        if now.drafted_tokens > before.drafted_tokens:
            yield f"{now.tokens_per_step(before):.1f} tok/step"
        if stats["num_running"]:
            yield f"{stats['num_running']} running"
        if stats["num_waiting"]:
            yield f"{stats['num_waiting']} waiting"
        yield f"{'KV' if stats.num_blocks else 'states'} {stats.cache_usage:.0%}"


def _fit(bar: Bar, notes: list[str]) -> str:
    """The first `notes`, as many as leave room for the bar on its line."""
    shown = {**bar.format_dict, "bar_format": str(bar.bar_format).replace("{bar}", "")}
    columns = shown["ncols"] or len(", ".join(notes)) + 1000

    def fits(text: str) -> bool:
        line = tqdm.format_meter(**shown | {"postfix": text, "ncols": None})
        return len(line) + MIN_BAR <= columns

    lengths = range(len(notes), 0, -1)
    return next(filter(fits, (", ".join(notes[:length]) for length in lengths)), "")


@contextlib.contextmanager
def _repeating(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` every `INTERVAL` seconds during the block, in a thread that ends with it."""
    ended = threading.Event()

    def repeat() -> None:
        # If the bar cannot be drawn, as its terminal or notebook is gone, the call goes on.
        with contextlib.suppress(Exception):
            while not ended.wait(INTERVAL):
                act()

    thread = threading.Thread(target=repeat, name="nanovllm-progress", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join(MAX_WAIT)
