"""Configs of families with experts: which layers have them, what is refused, what is skipped."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SAMPLES
from families.describe import write
from families.routed import PUBLISHED
from safetensors.torch import load_file, save_file

from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import SparseConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")


def read(name: str, **changes: Any) -> SparseConfig:
    config = ModelConfig.parse(PUBLISHED[name].file | changes)
    assert isinstance(config, SparseConfig)
    return config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, range(1, 28)),
        (dict(moe_layer_interval=3), range(2, 28, 3)),
        (dict(moe_layer_interval=2, moe_layer_start_index=4, moe_layer_end_index=8), (5, 7)),
        (dict(moe_layer_end_index=100), range(1, 28)),
    ],
)
def test_the_layers_with_experts_of_ernie(changes: dict[str, Any], expected: Any) -> None:
    assert read("ERNIE-4.5-21B-A3B", **changes).experts.layers == {*expected}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("ERNIE-4.5-21B-A3B", dict(use_bias=True), "use_bias must be False, got True"),
        ("ERNIE-4.5-21B-A3B", dict(moe_k=65), "moe_k must be in [1, 64], got 65"),
        ("ERNIE-4.5-21B-A3B", dict(num_experts=3), "moe_num_experts=64 and num_experts=3 differ"),
        ("ERNIE-4.5-21B-A3B", dict(moe_num_shared_experts=-1), "moe_num_shared_experts"),
        ("Hunyuan-A13B", dict(moe_topk=[8] * 31 + [4]), "moe_topk must be the same"),
        ("Hunyuan-A13B", dict(num_experts=[64, 32]), "num_experts must be the same"),
        ("Hunyuan-A13B", dict(moe_intermediate_size=[2048] * 32), "moe_intermediate_size must be"),
        ("Hunyuan-A13B", dict(num_shared_expert=2), "num_shared_expert must be 1, got 2"),
        ("Hunyuan-A13B", dict(use_cla=True), "use_cla must be False, got True"),
        ("GLM-4.5", dict(num_local_experts=9), "num_local_experts=9 and n_routed_experts=160"),
        ("GLM-4.5", dict(num_nextn_predict_layers=-1), "num_nextn_predict_layers"),
        ("GLM-4.5", dict(num_mtp_layers=3), "num_mtp_layers=3 and num_nextn_predict_layers=1"),
        ("GLM-4.5", dict(n_shared_experts=0), "n_shared_experts"),
        ("Solar-Open-100B", dict(use_qk_norm=True), "use_qk_norm must be False, got True"),
        ("Solar-Open-100B", dict(first_k_dense_replace=1), "first_k_dense_replace must be 0"),
        ("dots.llm1", dict(n_routed_experts=None), "n_routed_experts"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("GLM-4.5", "num_nextn_predict_layers"), ("Solar-Open-100B", "first_k_dense_replace"),
        ("Solar-Open-100B", "use_qk_norm"), ("ERNIE-4.5-21B-A3B", "use_bias"),
    ],
)  # fmt: skip
def test_null_is_as_absent(name: str, field: str) -> None:
    assert read(name, **{field: None}) == read(name)


def test_windows_of_dots_are_in_late_layers() -> None:
    config = read("dots.llm1", sliding_window=4096, max_window_layers=60)
    assert config.sliding_windows == (None,) * 60 + (4096,) * 2


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("GLM-4.5", "model.layers.3.eh_proj.weight"),
        ("GLM-4.5", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("ERNIE 4.5 MoE", "model.mtp_linear_proj.0.weight"),
    ],
)
def test_tensors_that_predict_later_tokens_are_skipped(
    name: str, unused: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor of a layer of the model itself would not be."""
    file = write(tmp_path, SAMPLES[name]) / "model.safetensors"
    save_file(load_file(file) | {unused: torch.ones(3)}, file)
    model = build_model(ModelConfig.from_dir(tmp_path), 16)
    with caplog.at_level("INFO", "nanovllm"):
        load_model(model, tmp_path)
    assert unused in caplog.text
    save_file(load_file(file) | {unused.replace("layers.3", "layers.4"): torch.ones(3)}, file)
    if "layers" in unused:
        with pytest.raises(ValueError, match=r"layers\.4"):
            load_model(model, tmp_path)
