"""The kernels' benchmark runs in Triton's interpreter, and does not time wrong kernels."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import LIMIT

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
KERNELS = {
    "store_kvcache", "plan_decode", "decode_attention", "decode_attention_fp8",
    "prefill_attention", "rms_norm", "add_rms_norm", "silu_and_mul", "few_rows", "experts",
    "quantized_linear",
    "norm_rope_store", "sample",
}  # fmt: skip


def run_cli(*options: str, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT,
        env=env | ({"TRITON_INTERPRET": "1"} if interpret else {}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPT.parent))  # as when the script is run
    spec = importlib.util.spec_from_file_location("kernel_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in the figures")


@pytest.mark.slow
def test_a_quick_run_measures_every_kernel(tmp_path: Path) -> None:
    interpret = not torch.cuda.is_available()
    done = run_cli("--quick", "--json", str(tmp_path / "figures.json"), interpret=interpret)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("the times mean nothing" in done.stdout) == interpret and "WRONG" not in done.stdout
    text = (tmp_path / "figures.json").read_text()
    kernels = json.loads(text, parse_constant=refuse)["kernels"]  # NaN and infinities
    everywhere = interpret or torch.cuda.get_device_capability() == (9, 0)
    assert set(kernels) == (KERNELS if everywhere else KERNELS - {"few_rows"})
    for row in (row for rows in kernels.values() for row in rows):
        assert row["right"] and row["bytes"] > 0
        assert min(row["ours_us"], row["twin_us"], row["floor_us"], row["speedup"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interpret", "message"),
    [
        (True, "only --quick"),
        pytest.param(False, "needs a CUDA device", marks=pytest.mark.skipif(
            torch.cuda.is_available(), reason="says what happens without a CUDA device")),
    ],
)  # fmt: skip
def test_where_nothing_can_be_measured_one_line_says_so(interpret: bool, message: str) -> None:
    done = run_cli(interpret=interpret)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert message in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "sample,typo"], "no kernel 'typo'"),
        (["--json", "/no/such/folder/file"], "no folder /no/such/folder"),
    ],
)
def test_a_wrong_option_is_an_error_of_usage(
    script: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        script.main(options)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_a_wrong_kernel_is_not_timed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One row of three is off by a twentieth.
    points = sys.modules["kernel_points"]
    scale = torch.tensor([[1.0], [1.05], [1.0]], dtype=points.DTYPE, device=points.DEVICE)
    monkeypatch.setattr(points, "silu_and_mul", lambda x: points.PLAIN.silu_and_mul(x) * scale)
    assert script.main(["--quick", "--only", "silu_and_mul"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_errors_count_row_by_row(script: Any) -> None:
    """A row of small entries must not hide behind one of large ones."""
    max_error = script.max_error
    twin = torch.tensor([[100.0, -50.0], [0.5, 0.25]])
    out = torch.tensor([[101.0, -50.0], [0.5, 0.30]])
    assert max_error(out, twin) == pytest.approx(0.1)
    assert max_error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert max_error((twin, out), (twin, twin)) == pytest.approx(0.1)
    assert not max_error(torch.full((2, 2), torch.nan), twin) <= 1
