"""The host benchmark runs, and leaves phases blank that the other checkout does not have."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host.py"
PHASES = ("schedule", "prepare", "launch", "read", "postprocess")

# The smallest package with nano-vllm's interface.
OTHER = {
    "sampling_params": "from types import SimpleNamespace as SamplingParams\n",
    "engine/block_manager": "",
    "engine/sequence": """
class Sequence:
    def __init__(self, token_ids, params):
        self.token_ids = list(token_ids)
        self.block_table = [0] * 8

    def __len__(self):
        return len(self.token_ids)
""",
    "engine/scheduler": """
from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence

class Scheduler:
    def __init__(self, config: Config):
        self.waiting, self.running = [], []

    def add(self, seq):
        self.waiting.append(seq)

    def schedule(self):
        is_prefill = bool(self.waiting)
        self.running += self.waiting
        self.waiting = []
        return self.running, is_prefill

    def postprocess(self, seqs, token_ids, is_prefill):
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)
""",
    "utils/context": """
def set_context(*args, **kwargs): pass
def reset_context(): pass
""",
}
RUNNER = """
import torch
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import set_context, reset_context

class ModelRunner:
    def prepare_decode(self, seqs: list[Sequence]):
        assert self.block_size == 256 and self.rank == 0
        ids = torch.tensor([seq.token_ids[-1] for seq in seqs], dtype=torch.int64, pin_memory=True)
        set_context(False)
        ids = ids.cuda(non_blocking=True)
        return ids, ids

    def prepare_sample(self, seqs):
        return torch.tensor([1.0 for _ in seqs], dtype=torch.float32, pin_memory=True).cuda()
"""


def run(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--num-seqs", "1", "40", "--num-steps=4", *options],
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(result["num_seqs"]) == {"1", "40"}
    return result["num_seqs"]["40"]


def checkout(path: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = path / "nanovllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return path


@pytest.mark.slow
def test_each_phase_is_timed() -> None:
    """Also after the engine's step has changed."""
    for _ in range(3):  # these are medians of few steps: on a busy machine, try again
        (row,) = run().values()
        assert set(row) == {*PHASES, "total"}
        assert all(row[phase] > 0 for phase in PHASES)
        if row["total"] == pytest.approx(sum(row[phase] for phase in PHASES), rel=0.5):
            return
    raise AssertionError(f"the phases are not the whole step: {row}")


@pytest.mark.slow
@pytest.mark.parametrize("has_runner", [False, True])
def test_another_checkout_is_timed_for_the_phases_it_has(has_runner: bool, tmp_path: Path) -> None:
    """A missing phase is None, not 0 seconds."""
    files = OTHER | ({"engine/model_runner": RUNNER} if has_runner else {})
    rows = run(f"--against={checkout(tmp_path, files)}")
    assert rows["nanovllm"]["total"] > 0
    theirs = rows["nano-vllm"]
    assert theirs["schedule"] > 0 and theirs["postprocess"] > 0
    for name in ("prepare", "launch", "read", "total"):
        assert theirs[name] > 0 if has_runner else theirs[name] is None
