"""README and docs/: blocks of Python run, with the embedded model; commands are ones that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import make_llm

import nanovllm
from nanovllm import LLM
from nanovllm.command.parser import make_parser
from nanovllm.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Blocks that need what a test has not: how many of a page, from its beginning on, and what.
NOT_RUN = {
    "adapters": (1, "an adapter"), "adding_a_model": (2, "a file of its own"),
    "batch": (2, "Ray"), "embeddings": (1, "a model with an embedding of its own"),
    "gguf": (2, "a file"), "quantization": (1, "published checkpoints"), "serving": (5, "servers"),
    "speculation": (4, "draft models"), "training": (1, "a trainer"),
}  # fmt: skip
GIVEN: dict[str, Any] = {"prompts": ["1+1="], "params": None}  # names that a page takes as known
TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{{ tools }}<tool_call>{% endif %}"
)


def blocks_of(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return found[NOT_RUN.get(page.stem, (0, ""))[0] :]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LLM]]:
    """Let `LLM` and `AsyncLLM` of any model be the embedded one; the LLMs are closed at the end."""
    made: list[LLM] = []

    def make(*_: Any, **options: Any) -> LLM:
        llm = make_llm(EMBEDDED_MODEL, max_model_len=2048, **options)
        llm.tokenizer.chat_template = TOOLS
        made.append(llm)
        return llm

    make_async = nanovllm.AsyncLLM
    monkeypatch.setattr(nanovllm, "LLM", make)
    monkeypatch.setattr(
        nanovllm, "AsyncLLM",
        lambda _: make_async(EMBEDDED_MODEL, device="cpu", cpu_kvcache_gib=0.05),
    )  # fmt: skip
    yield made
    for llm in made:
        llm.close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda p: p.stem)
def test_the_blocks_of_a_page_run_one_after_another(
    page: Path, made: list[LLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page may take nothing from another one: names, or an engine that is closed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    blocks = blocks_of(page)
    if page.stem == "measuring":
        names |= GIVEN | {"llm": nanovllm.LLM(profiler_dir=str(tmp_path))}
    for block in blocks:
        short = re.sub(r"max_tokens=\d{3,}", "max_tokens=24", block)
        exec(compile(short, str(page), "exec"), names)


def test_pages_have_the_blocks_that_are_not_run() -> None:
    for name, (number, _) in NOT_RUN.items():
        assert len(BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text("utf-8"))) >= number


COMMAND = re.compile(r"^ {4}(?:\$ )?(?:\w+=\S+ )*nanovllm (.*(?:\\\n.*)*)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    return [
        (page.stem, line.replace("\\\n", " "))
        for page in PAGES
        for line in COMMAND.findall(page.read_text(encoding="utf-8"))
        if "[" not in line  # which says what a command may have
    ]


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_has_options_that_exist(page: str, line: str) -> None:
    """An option that was renamed stays in no page."""
    del page
    words = shlex.split(line, comments=True)
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&", "&&", "2>", "<")]
    try:
        make_parser().parse_args(words[: min(ends, default=len(words))])
    except SystemExit as end:
        if end.code:
            pytest.fail(line)
