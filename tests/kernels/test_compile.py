"""Compiling C++: the cache, several processes at a time, and machines without a compiler."""

import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import FOREVER, LIMIT, wait_until

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.engine.start.placement import resolve_placement
from nanovllm.kernels.cpu import compile as compiling
from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.library import DEFINITIONS, SOURCE
from nanovllm.layers.backend import AttentionSpec
from nanovllm.layers.backends import choose_backend
from nanovllm.layers.ranks import ALONE
from nanovllm.models.config import ModelConfig

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


# Compilers that take long


@pytest.mark.usefixtures("compiler")
def test_a_slow_compiler_is_waited_for(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A busy machine may take any time. A warning says what takes it."""
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ncase "$*" in *" -c "*) sleep 0.5;; esac\nexec c++ "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiling, "LONG_SECONDS", 0.05)
    assert load(source).count(10) == 45
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings and "slow has been compiling a kernel for 0 s; Ctrl-C ends" in warnings[0]


@pytest.mark.usefixtures("compiler")
def test_ctrl_c_ends_a_compiler_that_hangs_and_it_holds_up_nobody(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, others = tmp_path / "begun", list[int]()
    monkeypatch.setenv("CXX", f"sh -c 'echo $$ > {begun}; exec sleep {FOREVER}'")

    def interrupt() -> None:
        try:
            wait_until("no compiler", lambda: begun.exists() and begun.read_text().strip())
            monkeypatch.delenv("CXX")
            others.append(load(source).count(10))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        load(source)
    thread.join()
    assert others == [45]
    assert not Path(f"/proc/{begun.read_text().strip()}").exists(), "the compiler still runs"
    assert [path.suffix for path in cache.iterdir()] == [".so"], "something is left in the cache"


# Who may write to the cache


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to another user than that of this process."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.usefixtures("compiler")
def test_only_the_user_can_write_to_the_cache(cache: Path, source: Path) -> None:
    """Whatever the umask is: others could replace what this user runs."""
    before = os.umask(0)
    try:
        load(source)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    (library,) = cache.iterdir()
    assert library.stat().st_mode & 0o022 == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", ["group", "others", "another", "link"])
def test_a_library_that_others_can_write_is_compiled_again(
    how: str, cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Older versions left some with a umask of 002."""
    load(source)
    (library,) = cache.iterdir()
    if how == "link":
        library.rename(tmp_path / "lib.so")
        library.symlink_to(tmp_path / "lib.so")
    elif how == "another":
        give_to_another(library, monkeypatch)
    else:
        library.chmod(0o775 if how == "group" else 0o757)
    before = library.lstat().st_ino
    assert load(source).count(10) == 45
    if how != "another" or os.geteuid() == 0:
        assert library.lstat().st_ino != before, "it was loaded"
        assert library.lstat().st_mode & 0o022 == 0
    says = {"another": "it belongs to user", "link": "it is no ordinary file"}
    assert f"is not used: {says.get(how, 'other users may write to it')}" in caplog.text


@pytest.mark.usefixtures("compiler")
def test_a_cache_of_another_user_is_not_used(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner may put there what this user would run. The library is compiled elsewhere."""
    load(source)
    (library,) = cache.iterdir()
    before = library.stat()
    give_to_another(cache, monkeypatch)
    assert load(source).count(10) == 45
    assert "is not used: it belongs to user" in caplog.text
    assert [*cache.iterdir()] == [library] and library.stat().st_ino == before.st_ino


@pytest.mark.usefixtures("compiler")
def test_a_folder_of_an_older_version_is_closed_for_others(cache: Path, source: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o775)
    load(source)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root")
def test_roots_libraries_are_used_by_all(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may have them."""
    load(source)
    cache.chmod(0o755)
    without_compiler(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert load(source).count(10) == 45
    assert cache.stat().st_mode & 0o777 == 0o755


# Machines on which it fails


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["lora_down", "tiled_linear", "gated_delta"])
def test_if_one_library_cannot_be_compiled_all_kernels_are_plain(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The libraries of adapters, codes and states too: when the backend is chosen."""

    def prepare(asked: str) -> None:
        if asked == name:
            raise RuntimeError("no C++ compiler that works: c++: killed")

    spec = dataclasses.replace(
        SPEC, has_adapters=name == "lora_down", is_quantized=name == "tiled_linear",
        has_states=name == "gated_delta",
    )  # fmt: skip
    monkeypatch.setattr(library, "prepare", prepare)
    assert choose_backend("auto", SPEC).kernels.name == "C++", "it needs no such library"
    assert not caplog.records
    backend = choose_backend("auto", spec)
    assert (backend.attention.name, backend.kernels.name) == ("torch", "plain PyTorch")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "c++: killed" in record.message
    with pytest.raises(ValueError, match=r"not work here .*c\+\+: killed"):
        choose_backend("cpu", spec)


@pytest.mark.usefixtures("compiler")
def test_startup_compiles_all_kernels_that_the_options_need(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that compiles would hold up all requests, and lose them if it fails."""
    asked = list[str]()

    monkeypatch.setattr(library, "prepare", asked.append)
    for options, expected in (
        (dict(), []),
        (dict(enable_lora=True), ["lora_down"]),
        (dict(quantization="int8", enable_lora=True), ["lora_down", "tiled_linear"]),
    ):
        config = Config(str(model_dir), device="cpu", **options)
        resolve_placement(config, ModelConfig.from_dir(model_dir, config.quantization), ALONE)
        assert asked == expected
        asked.clear()


def test_a_machine_without_a_compiler_runs_plain_pytorch(model_dir: Path, tmp_path: Path) -> None:
    """In a new process, with an empty cache and an empty PATH."""
    script = f"""
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("nanovllm").setLevel(logging.INFO)
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
    said = [line for line in lines if line.startswith("WARNING auto selects plain PyTorch")]
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
        (dict(head_dim=20), "a multiple of 8 and at most 512, got 20"),
        (dict(head_dim=520), "a multiple of 8 and at most 512, got 520"),
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
