"""Draw a picture of a run: the distributions of its times, and the run over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.serve.answer import Answer
from nanovllm.bench.serve.run import Run
from nanovllm.bench.serve.summary import METRICS, percentile

COLORS = {"ttft": "#1f77b4", "tpot": "#2ca02c", "itl": "#9467bd", "e2el": "#d62728"}
MAX_POINTS = 2000  # of a curve
NUM_BINS = 100  # of the curves over time


def check_plot(path: Path) -> None:
    """Raise before the run if its picture could not be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install 'nanovllm[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"--plot must end with one of {', '.join(sorted(known))}, got {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot: there is no directory {path.parent}")


def plot(run: Run, title: str, path: Path) -> None:
    """Write the picture. It shows only complete answers."""
    from matplotlib.figure import Figure

    whole = [answer for answer in run.answers if answer.error is None]
    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(3, 2)
    for axis, name in zip(axes.flat, METRICS, strict=False):
        _distribution(axis, name, _values_ms(whole, name))
    _tokens(axes[2, 0], run, whole)
    _in_flight(axes[2, 1], run, whole)
    figure.savefig(path, dpi=120)


def _values_ms(whole: Sequence[Answer], name: str) -> list[float]:
    """All values of a metric in milliseconds, sorted."""
    if name == "itl":
        return sorted(1e3 * gap for answer in whole for gap in answer.gaps)
    values = (getattr(answer, name) for answer in whole)
    return sorted(1e3 * value for value in values if value is not None)


def _distribution(axis: Any, name: str, values: Sequence[float]) -> None:
    """The share of values below each one, with p50, p90 and p99."""
    axis.set_title(METRICS[name])
    axis.set_xlabel("ms")
    axis.set_ylabel("share of values")
    axis.grid(alpha=0.3)
    axis.set_ylim(0, 1.02)
    if not values:
        return
    shares = [i / MAX_POINTS for i in range(MAX_POINTS + 1)]
    axis.plot([percentile(values, 100 * share) for share in shares], shares, color=COLORS[name])
    for percent, style in ((50, "-"), (90, "--"), (99, ":")):
        value = percentile(values, percent)
        axis.axvline(value, color="#555555", linestyle=style, linewidth=1,
                     label=f"p{percent} {value:,.1f} ms")  # fmt: skip
    axis.legend(loc="lower right")


def _tokens(axis: Any, run: Run, whole: Sequence[Answer]) -> None:
    """Output tokens per second over the time of the run; all chunks of an answer count equally."""
    width = max(run.seconds, 1e-9) / NUM_BINS
    rates = [0.0] * NUM_BINS
    for answer in whole:
        tokens = answer.output_tokens / (1 + len(answer.gaps))
        now = answer.first
        for gap in (0.0, *answer.gaps):
            now += gap
            rates[min(int((now - run.start) / width), NUM_BINS - 1)] += tokens / width
    axis.set_title("output tokens per second")
    axis.stairs(rates, [width * i for i in range(NUM_BINS + 1)], fill=True, color="#7fb3d5")
    _course(axis, run)


def _in_flight(axis: Any, run: Run, whole: Sequence[Answer]) -> None:
    """Requests in flight over the time of the run."""
    changes = sorted(
        [(a.start - run.start, 1) for a in whole] + [(a.last - run.start, -1) for a in whole]
    )
    times, numbers = [0.0], [0]
    for time, change in changes:
        times.append(time)
        numbers.append(numbers[-1] + change)
    axis.set_title("requests in flight")
    axis.step(times, numbers, where="post", color="#444444")
    _course(axis, run)


def _course(axis: Any, run: Run) -> None:
    axis.set_xlabel("seconds from the first request")
    axis.set_xlim(0, max(run.seconds, 1e-9))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
