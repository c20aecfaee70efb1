"""Bar: tqdm's progress bar, made safe against Ctrl-C."""

from typing import Any

from tqdm.auto import tqdm

from nanovllm.utils.interrupts import holding_interrupts


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar that Ctrl-C interrupts only between drawings. `make_bar` makes it.

    tqdm holds a lock of the whole process while it draws, and keeps it if an exception strikes
    there: every later bar would wait for it forever. No thread watches this bar.
    """

    monitor_interval = 0

    def refresh(self, *args: Any, **options: Any) -> Any:
        with holding_interrupts():
            return super().refresh(*args, **options)

    def close(self) -> None:
        with holding_interrupts():
            super().close()


def make_bar(**options: Any) -> Bar:
    """A bar with tqdm's `options`, drawn once."""
    with holding_interrupts():
        return Bar(**options)
