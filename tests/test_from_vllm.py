"""Scripts in the style of vLLM's offline examples run here with the import line changed alone."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_files import make_adapter
from waiting import LIMIT

from nanovllm.embedded import EMBEDDED_MODEL

SCRIPTS = Path(__file__).parent / "from_vllm"
IMPORTS = {
    "from vllm.v1.metrics.reader import": "from nanovllm.metrics import",
    "from vllm.sampling_params import": "from nanovllm.sampling_params import",
    "from vllm.inputs import": "from nanovllm import",
    "from vllm.lora.request import": "from nanovllm import",
    "from vllm import": "from nanovllm import",
}


def run(script: str, folder: Path, *arguments: str) -> list[str]:
    """The lines that a script of vLLM's style prints here; only its import lines are changed."""
    text = (SCRIPTS / script).read_text()
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    assert "vllm import" in text and not re.search(r"\bvllm\b", text)
    (folder / script).write_text(text)
    done = subprocess.run(
        [sys.executable, str(folder / script), EMBEDDED_MODEL, *arguments],
        capture_output=True, text=True,
        timeout=LIMIT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_basic(tmp_path: Path) -> None:
    lines = run("basic.py", tmp_path)
    assert lines[:4] == ["12+34=46 stop", "7+8=15 stop", "250+250=500 stop", "999+1=1000 stop"]
    assert [line.split(" ", 1)[1] for line in lines[4:]] == [
        "12+34= 2 [0, 1]", "None 2 [0, 1]", "250+250= 2 [0, 1]",
    ]  # fmt: skip


@pytest.mark.slow
def test_chat(tmp_path: Path) -> None:
    lines = run("chat.py", tmp_path)
    assert lines.count("-" * 40) == 3
    prompt = r"'<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n'"
    assert lines[2:5] == [f"{prompt} -> '46'"] * 3
    assert lines[6] == "'12+34=' -> '46'"


@pytest.mark.slow
def test_batch(tmp_path: Path) -> None:
    records = [json.loads(line) for line in run("batch.py", tmp_path)]
    assert len(records) == 100
    for record in records:
        a, b = record["prompt"].rstrip("=").split("+")
        assert record["text"] == str(int(a) + int(b))
        assert record["reason"] == "stop"


@pytest.mark.slow
def test_prefix_caching(tmp_path: Path) -> None:
    assert run("prefix_caching.py", tmp_path) == [
        "False [False, False, False]", "True [True, True, True]", "equal",
    ]  # fmt: skip


@pytest.mark.slow
def test_metrics(tmp_path: Path) -> None:
    lines = run("metrics.py", tmp_path)
    assert lines[:2] == ["12+34= 46", "7+8= 15"]
    assert "gauge vllm:num_requests_running 0" in lines
    assert "counter vllm:prompt_tokens 10 ['model_name']" in lines
    assert "counter vllm:generation_tokens 6 ['model_name']" in lines
    assert "counter vllm:request_success 2 ['finished_reason', 'model_name']" in lines
    assert "histogram vllm:time_to_first_token_seconds 2 True" in lines


@pytest.mark.slow
def test_beams_callables_and_vectors(tmp_path: Path) -> None:
    lines = run("more.py", tmp_path)
    assert lines[0] == "12+34=46 8 True"
    assert lines[1] == "False"
    assert lines[2:4] == ["6 46", "'' 3"]
    assert int(lines[4]) > 1 and lines[5] == "16"


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    """Both adapters are the same files; the third prompt's answer changes as the others do."""
    adapter = make_adapter(Path(EMBEDDED_MODEL), tmp_path / "adapter")
    lines = [ast.literal_eval(line) for line in run("lora.py", tmp_path, str(adapter))]
    plain, adapted, mixed = lines
    assert plain == ["46", "15", "500"]
    assert plain != adapted
    assert mixed == [plain[0], *adapted[1:]]
