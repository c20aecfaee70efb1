"""Compiling C++: the cache, several processes at a time, and machines without a compiler."""

import ctypes
import dataclasses
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import FOREVER, LIMIT

from nanovllm import LLM
from nanovllm.kernels.cpu import compile as compiling
from nanovllm.kernels.cpu.library import DEFINITIONS, SOURCE
from nanovllm.layers.backend import AttentionSpec
from nanovllm.layers.backends import choose_backend

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = """
#include <atomic>
extern "C" int count(int n) {
    std::atomic<int> sum{0};
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < n; i++) sum += i;
    return sum;
}
"""
SPEC = AttentionSpec(torch.device("cpu"), torch.float32, 4, 2, 16, None, True, torch.float32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanovllm"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "small.cpp"
    file.write_text(SMALL)
    return file


def load(source: Path) -> ctypes.CDLL:
    """As in a new process, without the function's own cache."""
    return compiling.load.__wrapped__(source)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler", "nor-this-one"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("compiler")
def test_a_library_is_compiled_once(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert load(source).count(10) == 45
        assert len(caplog.records) == 1 and "compiled small.cpp in" in caplog.records[0].message
        without_compiler(monkeypatch)
        assert load(source).count(10) == 45
    assert len(caplog.records) == 1
    assert len(list(cache.iterdir())) == 1, "the cache holds more than the library"


@pytest.mark.usefixtures("compiler")
def test_the_cache_key_covers_source_processor_and_flags(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source)
    source.write_text(SMALL.replace("sum += i", "sum += 2 * i"))
    assert load(source).count(10) == 90
    monkeypatch.setattr(compiling, "description", lambda: "another")
    load(source)
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-g"))
    load(source)
    assert len(list(cache.iterdir())) == 4


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("part", [0.3, 0.5, 0.99])
def test_a_library_that_is_cut_off_is_compiled_again(
    part: float, cache: Path, source: Path
) -> None:
    """Mapped, a file that ends too soon is a SIGBUS, which cannot be caught."""
    load(source)
    (library,) = cache.glob("*.so")
    data = library.read_bytes()
    library.unlink()  # this process has mapped it
    library.write_bytes(data[: int(len(data) * part)])
    assert load(source).count(3) == 3
    assert library.read_bytes() != data[: int(len(data) * part)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("left", [b"", b"not a library"])
def test_a_broken_library_in_the_cache_is_replaced(left: bytes, cache: Path, source: Path) -> None:
    load(source)
    (kept,) = cache.iterdir()
    kept.unlink()  # the file that is loaded here stays as it is
    kept.write_bytes(left)
    assert load(source).count(10) == 45
    assert kept.read_bytes()[:4] == b"\x7fELF", "the broken file was left there"


@pytest.mark.usefixtures("compiler")
def test_a_home_that_cannot_be_written_is_not_needed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # for root too
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert load(source).count(10) == 45
    assert "not kept" in caplog.records[0].message

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert load(source).count(10) == 45


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_folder_of_a_killed_process_is_removed(cache: Path, source: Path) -> None:
    """By a later one, but not while the process may still compile in it."""
    for name, age in (("tmpold", 2 * compiling.OLD_SECONDS), ("tmpnew", 0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "small.o").touch()
        os.utime(cache / name, (time.time() - age,) * 2)
    load(source)
    assert [path.name for path in sorted(cache.iterdir()) if path.is_dir()] == ["tmpnew"]


@pytest.mark.usefixtures("compiler")
def test_processes_may_compile_at_the_same_time(cache: Path, source: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nanovllm.kernels.cpu.compile import load;"
        "sys.stdin.readline(); assert load(Path(sys.argv[1])).count(10) == 45"
    )
    command = [sys.executable, "-c", script, str(source)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for child in children:
        child.communicate(b"\n", timeout=LIMIT)
    assert [child.returncode for child in children] == [0] * 4
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_library_uses_pytorchs_openmp(cache: Path) -> None:
    """Two thread pools would compete for the cores."""
    compiling.load.__wrapped__(SOURCE, DEFINITIONS)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    assert len({line for line in maps if "libgomp" in line or "libiomp" in line}) == 1


@pytest.mark.usefixtures("compiler")
def test_the_error_names_the_compiler_that_fails(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false --really")
    with pytest.raises(RuntimeError, match="works: false --really: status 1"):
        load(source)
    source.write_text("int f( { }")
    monkeypatch.delenv("CXX")
    with pytest.raises(RuntimeError, match=r"c\+\+: .*small.cpp:1:.*error"):
        load(source)
    without_compiler(monkeypatch)
    with pytest.raises(RuntimeError, match=r"works: no-such-compiler: .*nor-this-one: .*No such"):
        load(source)
    assert not list(cache.iterdir()), "something is left in the cache"


def test_a_compiler_that_never_ends_is_an_error(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would hang with it. The limit of one that works is far above what it takes."""
    monkeypatch.setattr(compiling, "MAX_SECONDS", 0.05)
    monkeypatch.setenv("CXX", f"sh -c 'exec sleep {FOREVER}'")
    with pytest.raises(RuntimeError, match=r"works: sh -c .* timed out after 0\.05 seconds"):
        load(source)
    assert not list(cache.iterdir()), "something is left in the cache"


def test_a_machine_without_a_compiler_runs_plain_pytorch(model_dir: Path, tmp_path: Path) -> None:
    """In a new process, with an empty cache and an empty PATH."""
    script = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from nanovllm import LLM, SamplingParams
options = dict(device="cpu", num_kvcache_blocks=8)
with LLM({str(model_dir)!r}, **options) as llm:
    assert llm.config.attention_backend == "torch"
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
try:
    LLM({str(model_dir)!r}, attention_backend="cpu", **options)
except ValueError as error:
    print("refused:", error)
"""
    env = {k: v for k, v in os.environ.items() if k != "CXX"}
    env |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.startswith("auto selects plain PyTorch")]
    assert len(said) == 1 and "no C++ compiler that works" in said[0]
    assert any("attention: torch, other kernels: plain PyTorch" in line for line in lines)
    refused = next(line for line in lines if line.startswith("refused:"))
    assert "attention_backend='cpu'" in refused and "'torch' works everywhere" in refused


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(device=torch.device("cuda")), "needs device='cpu', got 'cuda'"),
        (dict(dtype=torch.float16), "needs dtype 'float32' or 'bfloat16', got 'float16'"),
        (dict(head_dim=20), "a multiple of 8 and at most 256, got 20"),
        (dict(head_dim=264), "a multiple of 8 and at most 256, got 264"),
    ],
)
def test_the_cpu_backend_refuses_what_it_cannot_compute(
    changes: dict[str, Any], message: str
) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    with pytest.raises(ValueError, match=message) as e:
        choose_backend("cpu", spec)
    assert "'torch' works everywhere" in str(e.value)
    if spec.device.type == "cpu":
        assert choose_backend("auto", spec).attention.name == "torch"


@pytest.mark.usefixtures("compiler")
def test_auto_takes_the_cpu_kernels(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "nanovllm"),
        LLM(model_dir, device="cpu", num_kvcache_blocks=8) as llm,
    ):
        assert llm.config.attention_backend == "cpu"
    lines = [r.message for r in caplog.records if "attention:" in r.message]
    assert lines[0].endswith("attention: cpu, other kernels: C++")
