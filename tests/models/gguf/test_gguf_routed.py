"""GGUF files of families with experts next to layers that all tokens use, or chosen by biases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from converted_files import File, check_outputs, output, write_file

from nanovllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

SIZES = dict(moe_intermediate_size=32, intermediate_size=128)
FILES = [
    File("glm4moe", "GLM-4.5"),
    File("glm4moe", "GLM-4.5, norms of heads, groups, two shared"),
    File("glm4moe", "Solar Open"),
    File("glm4moe", "Solar Open, scaled, with biases and yarn"),
    File("dots1", "dots.llm1"),
    File("ernie4_5-moe", "ERNIE 4.5 MoE", SIZES),
    File("ernie4_5-moe", "ERNIE 4.5 MoE, every other layer, no shared, tied",
         dict(moe_layer_end_index=-1, moe_norm_min=1e-12)),
    File("hunyuan-moe", "HunYuan MoE", dict(intermediate_size=64)),
    File("hunyuan-moe", "HunYuan MoE, tied, lists, alpha"),
]  # fmt: skip
GLM, DOTS, ERNIE, HUNYUAN = FILES[0], FILES[4], FILES[5], FILES[7]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.sample)
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    check_outputs(file, tmp_path)


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path) -> None:
    """They follow the layers of the model, and count as some of its layers."""
    model = GLM.write_model(tmp_path)
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(64, 128), "blk.3.attn_q.weight": torch.ones(8)}
    path = write_file(model, "glm4moe", more=more, block_count=4, nextn_predict_layers=1)
    assert output(path)[0] == output(model)[0]


def test_a_bias_of_ernie_may_be_a_matrix_or_a_vector(tmp_path: Path) -> None:
    """Converters may write either, and checkpoints have a matrix."""
    file, name = ERNIE, "blk.1.exp_probs_b.bias"
    model, values = file.write_model(tmp_path), torch.arange(6.0)
    tokens = [
        output(write_file(model, file.architecture, more={name: bias}))[0]
        for bias in (values, values[None])
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (GLM, {"expert_gating_func": 1}), (GLM, {"expert_shared_feed_forward_length": 64}),
        (DOTS, {"attention.sliding_window": 8}), (ERNIE, {"expert_weights_norm": False}),
        (HUNYUAN, {"expert_shared_count": 2}), (HUNYUAN, {"expert_feed_forward_length": 32}),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused(
    file: File, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_file(file.write_model(tmp_path), file.architecture, **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(path), device="cpu")
