"""bench.py's comparison: engines in separate processes, on the same workload."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_clusters import has_ended
from test_bench import H200, bench, draw
from waiting import LIMIT, wait_until

from nanovllm.bench import measure
from nanovllm.bench.shapes import SHAPES
from nanovllm.bench.workload import TEMPERATURE
from nanovllm.engine.start.placement import resolve_dtype

peers = bench.peers
ROOT = Path(bench.__file__).parent
TINY = (64, 96, 2, 4, 2, 16, 259, True)
LENGTHS = dict(
    num_seqs=3, min_input_len=4, max_input_len=9, min_output_len=2, max_output_len=5
)  # fmt: skip
WORKLOAD = [f"--{name.replace('_', '-')}={value}" for name, value in LENGTHS.items()]

FAKE = """
import importlib.util, json, os, sys
from pathlib import Path
from types import SimpleNamespace

__version__ = "9.9"
CALLS = Path(__file__).parent / "calls"


class SamplingParams:
    def __init__(self, **fields):
        self.fields = fields


class LLM:
    def __init__(self, model, **options):
        print("chatter, where others want JSON")
        os.write(1, b"and more of it")
        self.about = dict(
            options=options, pid=os.getpid(), files=sorted(os.listdir(model)),
            config=json.loads((Path(model) / "config.json").read_text()),
            kernels=getattr(importlib.util.find_spec("kernels"), "origin", None),
        )

    def generate(self, prompts, params, use_tqdm):
        call = dict(prompts=prompts, params=[p.fields for p in params], **self.about)
        with CALLS.open("a") as file:
            print(json.dumps(call), file=file)
        {EXTRA}
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.fields["max_tokens"])])
            for p in params
        ]
"""


def fake_vllm(path: Path, extra: str = "") -> Path:
    """A package with vLLM's name and interface in `path`; `extra` runs in each generate."""
    package = path / "vllm"
    package.mkdir(parents=True)
    source = FAKE.replace("{EXTRA}", textwrap.indent(extra, " " * 8).strip() or "pass")
    (package / "__init__.py").write_text(source)
    (package / "platforms.py").write_text(
        "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(device_type='cpu')\n"
    )
    return path


def calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "vllm" / "calls").read_text().splitlines()]


def ends(pid: int) -> bool:
    """Whether a process ends; otherwise kill it."""
    try:
        return wait_until("the process is left", lambda: has_ended(pid))
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        return False


def job(engine: str, model: Path, **options: Any) -> dict[str, Any]:
    return dict(
        engine=engine, module=engine, model=str(model), device="cpu", dtype="float32",
        temperature=0.6, prompts=[[1, 2, 3], [4] * 7], output_lens=[4, 2], warmup=[5],
        options=options,
    )  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a very short run."""
    monkeypatch.setitem(SHAPES, "qwen3-42m", TINY)
    monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return ["--shape=qwen3-42m", "--device=cpu", "--num-kvcache-blocks=300", *WORKLOAD]


@pytest.mark.slow
def test_engines_take_turns_on_the_identical_workload(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All get the same prompts, lengths, type and weights, and a new process in each round."""
    path = fake_vllm(tmp_path)
    bench.main([*tiny, "--peers", "vllm", f"--peer-path=vllm={path}", "--repeats=2", "--json"])
    found, text = capsys.readouterr()
    out = text.splitlines()
    rounds = [line.split()[2] for line in out if line.startswith("  round ")]
    assert rounds == ["nanovllm", "vllm", "vllm", "nanovllm"]
    engines = json.loads(found)["engines"]
    ours, theirs = engines["nanovllm"], engines["vllm"]
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 2 and theirs["version"] == "9.9"
    assert theirs["ratio"] == pytest.approx(theirs["median_seconds"] / ours["median_seconds"])
    assert Path(ours["file"]).is_relative_to(ROOT / "nanovllm")
    assert any(line.split()[:2] == ["vllm", "9.9"] and "by round" in line for line in out)

    prompts, lens = draw(259, **LENGTHS)
    warmup, measured, _, again = calls(path)
    assert measured["prompts"] == [{"prompt_token_ids": prompt} for prompt in prompts]
    assert measured["params"] == [
        {"temperature": TEMPERATURE, "ignore_eos": True, "max_tokens": n} for n in lens
    ]
    assert warmup["prompts"] != measured["prompts"] == again["prompts"]
    assert measured["pid"] == warmup["pid"] != again["pid"]
    assert {"model.safetensors", "tokenizer.json"} <= set(measured["files"])
    own = str(resolve_dtype("auto", "bfloat16", torch.device("cpu"))).removeprefix("torch.")
    assert measured["options"]["dtype"] == measured["config"]["torch_dtype"] == own
    assert measured["config"]["rope_theta"] == 1_000_000  # not in one version's own spelling
    # Options that the command line does not set are the peer's.
    assert measured["options"]["max_model_len"] == 4096
    assert "max_num_seqs" not in measured["options"]
    assert not str(measured["kernels"]).startswith(str(ROOT))  # packages of this name exist


@pytest.mark.slow
def test_a_failed_engine_is_shown_and_the_others_continue(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash does not end the comparison, is reported, and is not repeated in each round."""
    path = fake_vllm(tmp_path / "a", "if len(prompts) > 1: raise MemoryError('all of it is gone')")
    nano = tmp_path / "b"
    (nano / "nanovllm").mkdir(parents=True)
    (nano / "nanovllm" / "__init__.py").touch()
    status = bench.main(
        [*tiny, "--peers", "vllm", f"--peer-path=vllm={path}", "--repeats=2",
         f"--peer-path=nano-vllm={nano}", "--max-num-seqs=2", "--json"]
    )  # fmt: skip
    assert status == 1
    found, out = capsys.readouterr()
    assert out.count("vllm failed: ended with status 1") == 2  # one is nano-vllm
    assert "MemoryError: all of it is gone" in out
    assert "nano-vllm needs CUDA and flash-attn, and the device is cpu" in out
    engines = json.loads(found)["engines"]
    assert len(engines["nanovllm"]["seconds"]) == 2 and "error" not in engines["nanovllm"]
    assert engines["vllm"]["seconds"] == [] and "all of it is gone" in engines["vllm"]["error"]
    assert {call["options"]["max_num_seqs"] for call in calls(path)} == {2}


def test_without_names_the_peers_that_are_found_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing peer is only an error if it was requested."""
    there = {"transformers": Path("/lib/transformers.py"), "nano-vllm": ROOT / "nanovllm/a.py"}
    monkeypatch.setattr(peers.Engine, "find", lambda self: there.get(self.name))
    assert [it.name for it in peers.find_engines([], [], [])] == ["nanovllm", "transformers"]
    with pytest.raises(ValueError, match=r"vllm: .* finds no package 'vllm'; give --peer-path"):
        peers.find_engines([], [], [f"vllm={ROOT}"])


@pytest.mark.slow
def test_transformers_runs_the_same_job(model_dir: Path, tmp_path: Path) -> None:
    """Its batch runs to the longest output: tokens beyond a row's length must not count."""
    (tmp_path / "transformers.json").write_text(json.dumps(job("transformers", model_dir)))
    engine = peers.Engine("transformers", "transformers")
    result = peers.run_engine(engine, tmp_path, {"OMP_NUM_THREADS": "1"})
    assert result["seconds"] > 0
    assert Path(result["file"]) == engine.find()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("for p in params: p.fields['max_tokens'] = 1", "vllm generated 2 tokens, not 6"),
        ("os._exit(7)", "ended with status 7"),
        ("os.kill(os.getpid(), 9)", "ended with signal 9"),
    ],
)
def test_a_run_without_all_tokens_is_no_result(
    extra: str, message: str, model_dir: Path, tmp_path: Path
) -> None:
    """An engine that stops early would be the fastest."""
    path = fake_vllm(tmp_path, extra)
    (tmp_path / "vllm.json").write_text(json.dumps(job("vllm", model_dir)))
    with pytest.raises(peers.PeerError, match=message):
        peers.run_engine(peers.Engine("vllm", "vllm", path=str(path)), tmp_path, {})


def test_processes_of_an_engine_end_with_it(model_dir: Path, tmp_path: Path) -> None:
    """Otherwise they would take cores and memory from the next engine."""
    leave = """
        if len(prompts) > 1:
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9e3)"])
            Path(__file__).with_name("left").write_text(str(child.pid))
    """
    path = fake_vllm(tmp_path, textwrap.dedent(leave))
    (tmp_path / "vllm.json").write_text(json.dumps(job("vllm", model_dir)))
    peers.run_engine(peers.Engine("vllm", "vllm", path=str(path)), tmp_path, {})
    assert ends(int((path / "vllm" / "left").read_text()))


def test_results_have_medians_and_ratios() -> None:
    """Ratios are theirs to ours, and by round those of the same round."""
    runs = {
        "nanovllm": peers.Runs([1.0, 2.0, 4.0]),
        "vllm": peers.Runs([2.0, 3.0, 16.0], {"version": "1"}),
        "transformers": peers.Runs([8.0], error="gone"),
        "nano-vllm": peers.Runs(error="no CUDA"),
    }
    result = peers.figures(runs, output_tokens=60, floor_seconds=0.5)
    assert result["vllm"]["output_tokens_per_second"] == 20 and result["vllm"]["version"] == "1"
    assert result["vllm"]["ratio"] == 1.5 and result["vllm"]["ratios"] == [2.0, 1.5, 4.0]
    assert result["nanovllm"]["roofline_percent"] == 25.0
    assert result["transformers"]["ratios"] == [8.0] and result["transformers"]["error"] == "gone"
    assert result["nano-vllm"] == {"seconds": [], "error": "no CUDA"}


def test_engines_see_only_the_selected_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers use the first GPUs that they see, whatever --device is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert peers.visible_devices(torch.device("cpu"), 2) == {}
    shown = peers.visible_devices(torch.device("cuda:1"), 2)
    assert shown == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    shown = peers.visible_devices(torch.device("cuda:1"), 1)
    assert shown == {"CUDA_VISIBLE_DEVICES": "5"}


def test_a_relative_python_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines run in another folder. Links are kept: a virtual environment's Python is one."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert peers.program("./python") == peers.program("~/python") == str(link)
    assert peers.folder(".") == str(tmp_path)


@pytest.mark.slow
def test_a_killed_comparison_leaves_nothing_running(model_dir: Path, tmp_path: Path) -> None:
    """`timeout` and job schedulers send SIGTERM, which runs no `finally` by itself."""
    note_pid = "Path(__file__).with_name('pid').write_text(str(os.getpid()))"
    path = fake_vllm(tmp_path, f"{note_pid}\n__import__('time').sleep(9e3)")
    (tmp_path / "vllm.json").write_text(json.dumps(job("vllm", model_dir)))
    code = (
        "import sys; from pathlib import Path; from benchmarks import peers;"
        f"peers.run_engine(peers.Engine('vllm', 'vllm', path={str(path)!r}),"
        f" Path({str(tmp_path)!r}), {{}})"
    )
    comparison = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    pid_file = path / "vllm" / "pid"
    wait_until("the engine does not begin", lambda: pid_file.exists() and pid_file.read_text())
    comparison.terminate()
    assert comparison.wait(timeout=LIMIT) == 128 + signal.SIGTERM
    assert ends(int(pid_file.read_text()))
