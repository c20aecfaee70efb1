"""The benchmark of quality: its distances by hand, and small runs whose order is known."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import LIMIT

from benchmarks.quality import compare, ranges
from benchmarks.rounded import pages, rounded_checkpoint
from benchmarks.trained import distances
from nanovllm.bench.machine import machine_name

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quality.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT
    )


def results_of(*options: str) -> dict[str, dict[str, Any]]:
    done = run(*options)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(line["machine"] == machine_name() for line in lines)
    for line in lines:
        assert f"| {line['variant']} | {line['kl']:.1e} |" in done.stdout
    return {line["variant"]: line for line in lines}


def test_the_divergence_is_that_of_the_reference_first() -> None:
    reference, other = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75]] * 2)
    kl, same = compare(reference.log(), other.log())
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    second = 0.9 * math.log(3.6) + 0.1 * math.log(0.1 / 0.75)
    torch.testing.assert_close(kl, torch.tensor([first, second]).double(), rtol=1e-6, atol=0)
    assert same.tolist() == [False, False]


def test_ranges_are_the_second_halves_of_contexts() -> None:
    assert ranges(300) == [(128, 256), (150, 300)]
    assert ranges(32_768) == [(128, 256), (1024, 2048), (4096, 8192), (16_384, 32_768)]


def test_distances_of_a_text_by_hand() -> None:
    """Two tokens follow the first: the last row has no next token, and counts as the others do."""
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    other = torch.tensor([[0.25, 0.75], [0.6, 0.4], [0.2, 0.8]]).log()
    found = distances([[0, 1, 0]], [reference], [other])
    assert found["perplexity"] == pytest.approx((0.75 * 0.6) ** -0.5)
    assert found["text_error"] == pytest.approx((math.log(1.5) + math.log(1.5)) / 2)
    errors = math.log(2) + math.log(1.5) + math.log(1.5) + math.log(4)
    assert found["error"] == pytest.approx(errors / 6)
    assert found["top_1"] == pytest.approx(2 / 3)


def test_only_the_weights_of_linear_layers_are_rounded(tmp_path: Path) -> None:
    """From several files; the values of Q8_0 are multiples of a float16 scale."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    weights = {
        name: torch.randn(shape).bfloat16()
        for name, shape in {"q_proj.weight": (2, 64), "embed_tokens.weight": (2, 64),
                            "norm.weight": (64,), "lm_head.weight": (2, 64)}.items()
    }  # fmt: skip
    for i, (name, weight) in enumerate(weights.items()):
        save_file({name: weight}, plain / f"{i}.safetensors")
    path = rounded_checkpoint(plain, "Q8_0", tmp_path)
    assert (path / "config.json").exists()
    found = load_file(path / "model.safetensors")
    changed = {name for name, weight in weights.items() if not torch.equal(found[name], weight)}
    assert changed == {"q_proj.weight"}
    rounded = found["q_proj.weight"].view(4, 32)
    scales = (weights["q_proj.weight"].float().view(4, 32).abs().amax(1) / 127).half().float()
    codes = rounded / scales[:, None]
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)


def test_pages_are_long_enough() -> None:
    assert len(pages(16)) == 16 and min(map(len, pages(16))) > 2000


@pytest.mark.slow
def test_formats_of_more_bits_are_nearer_to_the_reference() -> None:
    found = results_of("--models=embedded", "--variants=int8,fp8,int4,kv fp8", "--problems=100")
    assert list(found) == ["float32", "int8", "fp8", "int4", "kv fp8"]
    assert found["float32"]["kl"] == 0 and found["float32"]["top_1"] == 1
    assert 0 < found["int8"]["kl"] < found["fp8"]["kl"] < found["int4"]["kl"] < 0.2
    assert 0 < found["kv fp8"]["kl"] < 0.02
    for result in found.values():
        assert result["top_1"] > 0.9
        assert result["sums"] >= 0.97 and result["sums_after_others"] >= 0.97


@pytest.mark.slow
def test_a_long_context_has_a_figure_for_each_range() -> None:
    found = results_of("--models=long", "--context=400")
    assert list(found) == ["float32", "bf16", "kv fp8"]
    for variant, result in found.items():
        assert list(result["kl_at"]) == ["128-256", "200-400"]
        assert all((value > 0) == (variant != "float32") for value in result["kl_at"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    ["--models=gpt", "--variants=int3", "--variants=Q4_0", "--variants=Q4_K", "--context=1"],
)
def test_a_bad_option_is_a_usage_error(option: str) -> None:
    done = run(option)
    assert done.returncode == 2 and option.partition("=")[0] in done.stderr and not done.stdout
