"""Draw the figures of docs/ and fill the tables of docs/benchmarks.md, from docs/results/.

    python tools/plot_results.py

A line of docs/results/*.jsonl is one measured figure: what was measured, by which engine, the value
and its unit, the share of the roofline, the machine, the date, the command and a note. A table
stands between `<!-- table: NAME -->` and `<!-- end of table -->`. tests/test_docs.py checks that
the files are what this script writes. It needs the standard library only.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS = "nanovllm"
VLLM = "vLLM 0.26"
UNITS = ("output tok/s", "s", "ms", "us", "times")


@dataclass(frozen=True)
class Result:
    """One measured figure. `value` is more than 0; `roofline_percent` may be unknown."""

    what: str
    engine: str
    value: float
    unit: str
    roofline_percent: float | None
    machine: str
    date: str
    command: str
    note: str

    def __post_init__(self) -> None:
        texts = (self.what, self.engine, self.unit, self.machine, self.date, self.command)
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"a text is missing: {self}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}: {self}")
        if not self.value > 0:
            raise ValueError(f"value must be more than 0: {self}")
        datetime.date.fromisoformat(self.date)

    @property
    def text(self) -> str:
        """The value as tables show it: with its unit if that is seconds."""
        number = f"{self.value:,}"
        return f"{number} s" if self.unit == "s" else number

    def speed_against(self, other: "Result") -> float:
        """How many times as fast as `other`: more tokens in a second, or less time."""
        if self.unit != other.unit:
            raise ValueError(f"units differ: {self}, {other}")
        if self.unit == "output tok/s":
            return self.value / other.value
        return other.value / self.value


class Results:
    """All figures; each has its own pair of `what` and `engine`."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._by_key: dict[tuple[str, str], Result] = {}
        for result in results:
            key = (result.what, result.engine)
            if key in self._by_key:
                raise ValueError(f"two figures for {key}")
            self._by_key[key] = result

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Read every line of every file of `folder`."""
        files = sorted(folder.glob("*.jsonl"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return cls(Result(**json.loads(line)) for line in lines)

    def get(self, what: str, engine: str = OURS) -> Result:
        """Return the figure of `engine` for `what`; a missing one is a KeyError."""
        return self._by_key[what, engine]

    def ratio(self, what: str, engine: str) -> float:
        """How many times as fast we are as `engine`."""
        return self.get(what).speed_against(self.get(what, engine))


# Tables.


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table; `header` is its first line."""
    columns = header.count("|") - 1
    lines = [header, "|" + "---|" * columns]
    for row in rows:
        cells = list(row)
        assert len(cells) == columns, cells
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return "\n".join(lines)


def percent(result: Result) -> str:
    """The share of the roofline, or nothing if it is unknown."""
    return "" if result.roofline_percent is None else f"{result.roofline_percent:.0f}%"


GPU_WORKLOADS = {
    "qwen3-0.6b, 1 request": "Qwen3-0.6B, 1 request",
    "qwen3-0.6b, 32 requests": "Qwen3-0.6B, 32 requests",
    "qwen3-0.6b, 256 requests": "Qwen3-0.6B, 256 requests",
    "qwen3-0.6b, 1,024 requests": "Qwen3-0.6B, 1,024 requests",
    "qwen3-8b, 1 request": "Qwen3-8B, 1 request",
    "qwen3-8b, 256 requests": "Qwen3-8B, 256 requests",
    "qwen3-8b, 64 long prompts": "Qwen3-8B, 64 long prompts",
    "qwen3-8b, 1 request, 2 GPUs": "Qwen3-8B, 1 request, 2 GPUs",
    "qwen3-8b, 256 requests, 2 GPUs": "Qwen3-8B, 256 requests, 2 GPUs",
    "qwen3-30b-a3b, 16 requests": "Qwen3-30B-A3B, 16 requests",
    "qwen3-30b-a3b, 128 requests": "Qwen3-30B-A3B, 128 requests",
    "qwen3-30b-a3b, 512 requests": "Qwen3-30B-A3B, 512 requests",
}
NANO_VLLM = ("qwen3-0.6b, 256 requests", "nano-vllm")
H100 = ("qwen3-0.6b, 256 requests, H100", "Qwen3-0.6B, 256 requests, one H100")


def gpu_table(results: Results) -> str:
    """Whole runs on a GPU: ours, vLLM's and nano-vllm's."""

    def row(what: str, label: str, peer: str) -> list[str]:
        ours, theirs = results.get(what), results.get(what, peer)
        ratio = f"{results.ratio(what, peer):.2f}"
        return [label, ours.text, percent(ours), peer, theirs.text, ratio]

    rows = [row(what, label, VLLM) for what, label in GPU_WORKLOADS.items()]
    rows.insert(3, row(NANO_VLLM[0], GPU_WORKLOADS[NANO_VLLM[0]], NANO_VLLM[1]))
    ours = results.get(H100[0])
    rows.append([H100[1], ours.text, percent(ours), "", "", ""])
    return markdown("| workload | nanovllm | of the roofline | peer | its figure | ratio |", rows)


LLAMA_CPP = "llama.cpp"
LLAMA_CPP_WORKLOADS = {
    f"qwen3-0.6b, {formats}, {measure}, 2 cores with AMX": f"{formats}, {measure}"
    for formats in ("bf16, BF16", "int8, Q8_0", "int4, Q4_0")
    for measure in ("1 request", "16 requests")
}
VLLM_CPU = "nanovllm / vLLM CPU"
VLLM_CPU_WORKLOADS = {
    f"{shape}, {requests} requests, {cores} cores": f"{name}, {requests} requests, {cores} cores"
    for cores in (4, 2)
    for shape, name, requests in (("qwen3-42m", "Qwen3-42M", 64), ("qwen3-0.6b", "Qwen3-0.6B", 16))
} | {"qwen3-0.6b, 16 requests, 2 cores with AMX": "Qwen3-0.6B, 16 requests, 2 cores with AMX"}


def cpu_table(results: Results) -> str:
    """Whole runs on a CPU: ours, llama.cpp's and vLLM's CPU build's."""
    rows = [
        [f"Qwen3-0.6B, {label}", results.get(what).text, LLAMA_CPP,
         results.get(what, LLAMA_CPP).text, f"{results.ratio(what, LLAMA_CPP):.2f}"]
        for what, label in LLAMA_CPP_WORKLOADS.items()
    ]  # fmt: skip
    for what, label in VLLM_CPU_WORKLOADS.items():
        rows.append([label, "", "vLLM, CPU build", "", f"{results.get(what, VLLM_CPU).value:.2f}"])
    return markdown("| workload | nanovllm | peer | its figure | ratio |", rows)


FLASH_ATTN = "flash-attn 2.8.3"
ATTENTION = (
    *("decode attention, " + size for size in (
        "1 x 1,000", "8 x 1,000", "64 x 1,000", "64 x mixed", "256 x 1,000", "256 x mixed",
        "1 x 131,072",
    )),
    *("prefill attention, " + size for size in (
        "16 x 1,024", "4 x 4,096", "2 x 8,192", "4 x 1,024 + 3,072 cached",
    )),
)  # fmt: skip


def attention_table(results: Results) -> str:
    """Our attention kernels and flash-attn's."""
    rows = []
    for name in ATTENTION:
        what = f"{name}, 32 query heads"
        ours, theirs = results.get(what), results.get(what, FLASH_ATTN)
        ratio = f"{results.ratio(what, FLASH_ATTN):.2f}"
        label = name.replace(" attention,", ",")
        rows.append([label, ours.text, theirs.text, ratio, percent(ours)])
    return markdown("| sequences x tokens | ours | flash-attn 2 | ratio | of the roofline |", rows)


LAYER = "a {} layer without attention, {}"
KERNELS = (
    *((LAYER.format(name, rows), "cuBLAS") for name in ("Qwen3-0.6B", "Qwen3-8B")
      for rows in ("1 row", "32 rows")),
    (LAYER.format("Qwen3-0.6B", "256 rows"), "cuBLAS"),
    ("add_rms_norm, size 4,096, 16,384 tokens", "PyTorch"),
    ("silu_and_mul, size 12,288, 16,384 tokens", "PyTorch"),
    ("norm_rope_store, 32/8 heads, 16,384 tokens", "PyTorch"),
    ("sample, 256 x 151,936, temperature 0.6", "PyTorch"),
    ("a layer of experts, 64 tokens, 128 of 128 experts here", "PyTorch"),
    ("a layer of experts, 256 tokens, 128 of 128 experts here", "PyTorch"),
    ("a layer of experts, 16,384 tokens, 128 of 128 experts here", "PyTorch"),
)  # fmt: skip


def kernels_table(results: Results) -> str:
    """Our other kernels, and cuBLAS and PyTorch."""
    rows = []
    for what, peer in KERNELS:
        ours, theirs = results.get(what), results.get(what, peer)
        ratio = f"{results.ratio(what, peer):.2f}"
        label = what.removesuffix(", 128 of 128 experts here")
        rows.append([label, ours.text, f"{peer}: {theirs.text}", ratio, percent(ours)])
    return markdown("| operation | ours | other | ratio | of the roofline |", rows)


PHASES = ("schedule", "prepare", "launch", "read", "postprocess", "together")


def host_table(results: Results) -> str:
    """The phases of a decode step on the host, and nano-vllm's total."""
    rows = []
    for sequences in ("1 sequence", "64 sequences", "256 sequences", "1,024 sequences"):
        step = f"host, a decode step of {sequences}: "
        phases = [results.get(step + phase).text for phase in PHASES]
        total = step + PHASES[-1]
        theirs, ratio = results.get(total, "nano-vllm"), results.ratio(total, "nano-vllm")
        rows.append([sequences, *phases, theirs.text, f"{ratio:.2f}"])
    return markdown(f"| | {' | '.join(PHASES)} | nano-vllm together | ratio |", rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "gpu": gpu_table,
    "cpu": cpu_table,
    "attention": attention_table,
    "kernels": kernels_table,
    "host": host_table,
}


def fill_tables(page: str, results: Results) -> str:
    """Return `page` with every table made anew; each of TABLES must be there once."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(\n<!-- end of table -->)"
        filled = f"\\g<1>\n{make(results)}\n\\g<2>"
        page, count = re.subn(pattern, filled, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"there must be one table {name!r}, not {count}")
    return page


# Figures. Background and text change together, so that a figure is readable on any page.

STYLE = """
  .background { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e }
  .bar { fill: #2f6fd0 } .mark { fill: #bc4c00 } .line { stroke: #1f2328 }
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
  .title { font-size: 16px; font-weight: 600 } .bold { font-weight: 600 }
  .end { text-anchor: end } .middle { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .bar { fill: #4493f8 } .mark { fill: #f0883e } .line { stroke: #f0f6fc }
  }
"""
WIDTH, MARGIN, LABELS, ROW = 800, 20, 250, 22


class Drawing:
    """An SVG that grows downwards; `y` is the next row's upper edge."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.y = 34.0
        self.text(MARGIN, title, "text title")
        self.y += 20
        self.text(MARGIN, subtitle, "quiet")
        self.y += 10

    def text(self, x: float, text: str, style: str, drop: float = 0) -> None:
        position = f'x="{x:g}" y="{self.y + drop:g}"'
        self._parts.append(f'<text {position} class="{style}">{escape(text)}</text>')

    def bar(self, x: float, width: float) -> None:
        position = f'x="{x:g}" y="{self.y + 4:g}" width="{width:g}" height="{ROW - 8}"'
        self._parts.append(f'<rect {position} rx="2" class="bar"/>')

    def mark(self, x: float) -> None:
        position = f'x="{x - 2:g}" y="{self.y + 1:g}" width="4" height="{ROW - 2}"'
        self._parts.append(f'<rect {position} class="mark"/>')

    def line(self, x: float, top: float, bottom: float) -> None:
        position = f'x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}"'
        self._parts.append(f'<line {position} class="line"/>')

    def finish(self) -> str:
        height = self.y + MARGIN
        return "\n".join((
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
            f' width="{WIDTH}" height="{height:g}" role="img"'
            f' aria-label="{escape(self._title)}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="background"/>',
            *self._parts,
            "</svg>\n",
        ))  # fmt: skip


def speed_figure(results: Results) -> str:
    """How many times as fast as each peer, by workload."""
    unit = 110  # a ratio of 1, in pixels
    drawing = Drawing(
        "How many times as fast as other engines",
        "The line is the other engine's speed. At the right: nanovllm and the other engine.",
    )

    def section(title: str, rows: Iterable[tuple[str, float, str]]) -> None:
        drawing.y += 24
        drawing.text(MARGIN, title, "text bold")
        drawing.y += 6
        top = drawing.y
        for label, ratio, figures in rows:
            drawing.text(LABELS, label, "text end", 15)
            drawing.bar(LABELS + 10, ratio * unit)
            drawing.text(LABELS + 18 + max(ratio, 1) * unit, f"{ratio:.2f}", "text bold", 15)
            drawing.text(WIDTH - MARGIN, figures, "quiet end", 15)
            drawing.y += ROW
        drawing.line(LABELS + 10 + unit, top, drawing.y)

    def compared(what: str, label: str, peer: str) -> tuple[str, float, str]:
        ours, theirs = results.get(what), results.get(what, peer)
        unit_name = "" if ours.unit == "s" else " tok/s"
        figures = f"{ours.text} | {theirs.text}{unit_name}"
        return label, results.ratio(what, peer), figures

    gpu = [compared(what, label, VLLM) for what, label in GPU_WORKLOADS.items()]
    section("NVIDIA H200, against vLLM 0.26", gpu)
    nano_vllm = compared(NANO_VLLM[0], GPU_WORKLOADS[NANO_VLLM[0]], NANO_VLLM[1])
    section("NVIDIA H200, against nano-vllm", [nano_vllm])
    cpp = [compared(what, name, LLAMA_CPP) for what, name in LLAMA_CPP_WORKLOADS.items()]
    section("CPU, 2 cores with AMX, Qwen3-0.6B, against llama.cpp", cpp)
    cpu = [(label, results.get(what, VLLM_CPU).value, "")
           for what, label in VLLM_CPU_WORKLOADS.items()]  # fmt: skip
    section("CPU, against vLLM's CPU build", cpu)
    return drawing.finish()


def roofline_figure(results: Results) -> str:
    """Share of the roofline, ours as bars and vLLM's as marks.

    Both ran the same workload, so that vLLM's share follows from ours and the ratio of speeds.
    """
    whole = WIDTH - LABELS - 130  # 100%, in pixels
    drawing = Drawing(
        "Share of the roofline that is reached",
        "100% is the least time that the memory and the arithmetic of the GPU allow.",
    )
    drawing.y += 8
    drawing.bar(LABELS + 10, 24)
    drawing.text(LABELS + 40, "nanovllm", "text", 15)
    drawing.mark(LABELS + 130)
    drawing.text(LABELS + 140, VLLM, "text", 15)
    drawing.y += ROW + 4
    top = drawing.y
    for what, label in (*GPU_WORKLOADS.items(), H100):
        ours = results.get(what)
        assert ours.roofline_percent is not None, what
        share = ours.roofline_percent / 100
        drawing.text(LABELS, label, "text end", 15)
        drawing.bar(LABELS + 10, share * whole)
        figures = f"{share:.0%}"
        if what in GPU_WORKLOADS:
            theirs = share / results.ratio(what, VLLM)
            drawing.mark(LABELS + 10 + theirs * whole)
            figures += f" | {theirs:.0%}"
        drawing.text(WIDTH - MARGIN, figures, "quiet end", 15)
        drawing.y += ROW
    drawing.line(LABELS + 10 + whole, top, drawing.y)
    drawing.y += 16
    drawing.text(LABELS + 10 + whole, "100%", "quiet middle")
    return drawing.finish()


FIGURES: dict[str, Callable[[Results], str]] = {
    "speed": speed_figure,
    "roofline": roofline_figure,
}


def make_files() -> dict[Path, str]:
    """What each generated file should contain."""
    results = Results.read(DOCS / "results")
    page = DOCS / "benchmarks.md"
    return {
        page: fill_tables(page.read_text(encoding="utf-8"), results),
        **{DOCS / "figures" / f"{name}.svg": draw(results) for name, draw in FIGURES.items()},
    }


def main() -> None:
    """Write the figures and the tables."""
    for path, text in make_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
