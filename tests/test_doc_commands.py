"""README and docs/: the commands in shell blocks run, with the embedded model.

What cannot run in a few seconds without a network is listed, with the reason.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, serving
from waiting import LIMIT

from nanovllm.embedded import EMBEDDED_MODEL

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?<=\n\n)(?:    .*\n)+|^```bash\n((?:.*\n)*?)```", re.MULTILINE)
NAMES = ("nanovllm", "curl", "echo", "python", "pip", "make", "docker", "serve")
# How commands begin that do not run here, and what they need.
NOT_RUN = {
    "make": "a virtual environment of its own, for minutes",
    "NANOVLLM_TESTS_SEED=": "all tests",
    "pip install": "a virtual environment of its own",
    "docker build": "Docker",
    "serve run": "Ray", "python examples/ray_serve.py": "Ray",
    "python bench.py": "minutes", "python benchmarks/": "minutes, or a GPU",
    "nanovllm bench --shape": "minutes",
    "nanovllm run-batch INPUT": "it says what a command may have",
    "nanovllm quantize": "a published checkpoint",
    "nanovllm generate --model": "a published checkpoint",
    "nanovllm chat --model": "a published checkpoint",
    "nanovllm serve Qwen": "a published checkpoint; tests/server starts the embedded model",
    "curl localhost:8000/v1/completions -H": "the server of the line before",
}  # fmt: skip
SMALL = ("--device", "cpu", "--cpu-kvcache-gib", "0.05")
FEW = ("--num-prompts", "4", "--input-len", "8", "--output-len", "4")
ADDRESS = "http://127.0.0.1:8000"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
Shown = tuple[str, str]  # a command, and the output that the page shows


def commands_of(page: Path) -> list[Shown]:
    """The commands of a page's shell blocks."""
    found: list[Shown] = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        lines = (block[1] or re.sub("^    ", "", block[0], flags=re.MULTILINE)).splitlines()
        joined = "\n".join(lines).replace("\\\n", " ").splitlines()
        marked = any(line.startswith("$ ") for line in joined)
        for line in joined:
            word = re.match(r"(?:\$ )?(?:\w+=\S+ )*(\S*)", line)
            if line.startswith("$ ") or (not marked and word and word[1] in NAMES):
                command = re.sub(r" +#[^'\"]*$", "", line.removeprefix("$ "))
                found.append((command, ""))
            elif found and marked:
                found[-1] = found[-1][0], found[-1][1] + line + "\n"
    return found


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


ALL = {page: commands_of(page) for page in PAGES}
SHOWN = sorted({one for shown in ALL.values() for one in shown if is_run(one[0])})
RUN = list(dict(SHOWN).items())  # with the output of a page that shows it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", str(EMBEDDED_MODEL)) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's package, and the files that pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "nanovllm").symlink_to(ROOT / "nanovllm")
    prompts = [{"prompt": "12+34="}, {"prompt": "250+250="}]
    for name, lines in {
        "requests.jsonl": [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": prompt}
            for i, prompt in enumerate(prompts)
        ],
        "questions.jsonl": prompts,
    }.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words_of(command: str, server: Server | None) -> list[str]:
    """The words of one command, made small; a client gets the address of the server."""
    words = shlex.split(command, comments=True)
    if words[0] == "nanovllm":
        words = [sys.executable, "-m", *words]
    if "bench" in words:
        words += [*FEW, "--base-url", ADDRESS]
    elif words[0] == sys.executable and "info" not in words:
        words += SMALL
    return [word.replace(ADDRESS, server.url) if server else word for word in words]


def needs_server(command: str) -> bool:
    return command.startswith(("nanovllm bench serve", "curl"))


@pytest.mark.parametrize(("command", "shown"), RUN, ids=[command for command, _ in RUN])
def test_a_command_runs_and_shows_what_its_page_shows(
    command: str, shown: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("server") if needs_server(command) else None
    data = "12+34=\n/quit\n"
    *first, last = command.split(" | ")
    if first:
        data = " ".join(shlex.split(first[0])[1:]) + "\n"
        assert first[0].startswith("echo ") and len(first) == 1
    words = words_of(last, server)
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    done = subprocess.run(
        words, input=data, text=True, capture_output=True, timeout=LIMIT, env=ENV, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert without_times(shown) in without_times(done.stdout + done.stderr)


def without_times(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(?= s,| tok/s)", "-", text)


def test_what_is_not_run_is_in_a_page() -> None:
    for beginning in NOT_RUN:
        assert any(one.startswith(beginning) for shown in ALL.values() for one, _ in shown), (
            f"no page has {beginning!r}"
        )
    assert len(RUN) >= 12
