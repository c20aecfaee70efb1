"""Summary: the figures of a run, for people and for programs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanovllm.bench.serve.answer import Answer
from nanovllm.bench.serve.run import Run

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
LIMITED = ("ttft", "tpot", "e2el")  # times that goodput can limit
PERCENTILES = (50, 90, 99)
MAX_MESSAGES = 5  # kinds of errors that are shown
BUSY = 0.8  # of a core: above this, the client's own work may limit the figures


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, interpolated between the two nearest ones."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def statistics_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None if there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    found = {"mean": sum(ordered) / len(ordered)}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def meets(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Whether an answer is within all limits; a missing time is within its limit."""
    times = {name: getattr(answer, name) for name in limits_ms}
    return all(time is None or 1e3 * time <= limits_ms[name] for name, time in times.items())


def summarize(run: Run, limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """All figures of a run. Times are those of complete answers."""
    whole = [answer for answer in run.answers if answer.error is None]
    errors = Counter(answer.error for answer in run.answers if answer.error is not None)
    seconds = max(run.seconds, 1e-9)
    input_tokens = sum(answer.input_tokens for answer in whole)
    output_tokens = sum(answer.output_tokens for answer in whole)
    tpots = [answer.tpot for answer in whole]
    return {
        "completed": len(whole),
        "failed": len(run.answers) - len(whole),
        "errors": [{"message": text, "count": n} for text, n in errors.most_common(MAX_MESSAGES)],
        "seconds": seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "tokens_counted_by": "server" if all(a.usage for a in whole) else "chunks",
        "requests_per_second": len(whole) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (input_tokens + output_tokens) / seconds,
        "goodput_limits_ms": dict(limits_ms) or None,
        "goodput_requests_per_second": (
            sum(meets(answer, limits_ms) for answer in whole) / seconds if limits_ms else None
        ),
        "ttft_ms": statistics_ms(answer.ttft for answer in whole),
        "tpot_ms": statistics_ms(tpot for tpot in tpots if tpot is not None),
        "answers_in_one_chunk": sum(answer.came_at_once for answer in whole),
        "itl_ms": statistics_ms(gap for answer in whole for gap in answer.gaps),
        "e2el_ms": statistics_ms(answer.e2el for answer in whole),
        "client_cpu_share": run.cpu_seconds / seconds,
    }


def text(result: Mapping[str, Any]) -> str:
    """The figures as lines and a table."""
    lines = [
        f"  {result['completed']:,} answers in {result['seconds']:.2f} s:"
        f" {result['requests_per_second']:,.2f} requests/s,"
        f" {result['output_tokens_per_second']:,.1f} output tok/s,"
        f" {result['total_tokens_per_second']:,.1f} total tok/s",
        f"  {result['input_tokens']:,} tokens in, {result['output_tokens']:,} out",
        *_goodput(result),
        "",
        _row("milliseconds", ["mean", *(f"p{percent}" for percent in PERCENTILES)]),
        *(_metric(name, result[f"{name}_ms"]) for name in METRICS),
        *_notes(result),
    ]
    return "\n".join(lines)


def _goodput(result: Mapping[str, Any]) -> list[str]:
    limits = result["goodput_limits_ms"]
    if not limits:
        return []
    texts = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
    return [f"  goodput: {result['goodput_requests_per_second']:,.2f} requests/s with {texts}"]


def _metric(name: str, figures: Mapping[str, float] | None) -> str:
    values = ["-"] * (1 + len(PERCENTILES))
    if figures is not None:
        values = [f"{value:,.2f}" for value in figures.values()]
    return _row(f"{METRICS[name]} ({name})", values)


def _row(title: str, cells: Iterable[str]) -> str:
    return f"  {title:<30}" + "".join(f"{cell:>12}" for cell in cells)


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Errors of the run, and reasons to doubt the figures."""
    lines = []
    if result["tokens_counted_by"] == "chunks":
        lines.append("the server sends no usage: output tokens are chunks, prompts are not counted")
    if number := result["answers_in_one_chunk"]:
        lines.append(
            f"{number:,} answers of several tokens came in one chunk: they have no tpot, and are"
            " not in its figures"
        )
    if result["client_cpu_share"] > BUSY:
        share = result["client_cpu_share"]
        lines.append(f"this client used {share:.0%} of a core: it may be what limits the figures")
    if result["failed"]:
        lines.append(f"{result['failed']:,} requests have failed:")
        lines += [f"  {error['count']:,} x {error['message']}" for error in result["errors"]]
    return [f"  {line}" for line in ["", *lines]] if lines else []
