"""GGUF files of models with states: logits and tokens of the models that they are made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from converted_files import File, check_outputs, output, write_file

from nanovllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

WIDE = dict(intermediate_size=32, shared_intermediate_size=32)
MOE = dict(moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)
VALUES = dict(linear_value_head_dim=16)  # blocks of 32 hold weights of two heads
SHARED = dict(shared_expert_intermediate_size=32)
FILES = [
    File("lfm2", "LFM2", dict(block_multiple_of=32, tie_word_embeddings=True)),
    File("lfm2moe", "LFM2-MoE", dict(tie_word_embeddings=True)),
    File("mamba2", "Mamba 2"),
    File("granitehybrid", "Granite 4", WIDE),
    File("granitehybrid", "Granite 4, dense", dict(WIDE, shared_intermediate_size=64)),
    File("falcon-h1", "Falcon-H1", dict(mamba_d_ssm=64, mamba_n_heads=4)),
    File("falcon-h1", "Falcon-H1, gate first", dict(tie_word_embeddings=False)),
    File("nemotron_h", "Nemotron-H", dict(mamba_head_dim=16)),
    File("nemotron_h_moe", "Nemotron 3", MOE),
    File("nemotron_h_moe", "Nemotron 3, latent", dict(MOE, moe_latent_size=32, mlp_bias=False)),
    File("qwen35", "Qwen3.5", VALUES),
    File("qwen35", "Qwen3.5 tied", dict(linear_value_head_dim=16)),
    File("qwen35", "Qwen3.5", dict(linear_value_head_dim=32)),
    File("qwen35moe", "Qwen3.5 experts", VALUES | SHARED),
    File("qwen3next", "Qwen3-Next", VALUES | SHARED | dict(mlp_only_layers=[])),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.sample} {len(file.fields)}")
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    check_outputs(file, tmp_path)


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path) -> None:
    """They follow the layers of the model, and count as some of its layers."""
    file = next(file for file in FILES if file.architecture == "qwen35")
    model = file.write_model(tmp_path)
    tokens, _ = output(model)
    more = {"blk.2.nextn.eh_proj.weight": torch.ones(64, 128), "blk.2.attn_q.weight": torch.ones(8)}
    path = write_file(model, "qwen35", more=more, block_count=3, nextn_predict_layers=1)
    assert output(path)[0] == tokens


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (FILES[0], {"shortconv.l_cache": 0}), (FILES[0], {"attention.head_count_kv": [2, 2]}),
        (FILES[1], {"expert_gating_func": 1}), (FILES[1], {"expert_weights_scale": 2.5}),
        (FILES[0], {"attention.sliding_window": [0, 8, 8]}),
        (FILES[2], {"ssm.dt_b_c_rms": True}), (FILES[3], {"rope.scaling.finetuned": True}),
        (FILES[8], {"expert_gating_func": 1}), (FILES[-1], {"expert_weights_norm": False}),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused(
    file: File, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_file(file.write_model(tmp_path), file.architecture, **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(path), device="cpu")
