"""GGUF files of MiniMax-M2, Trinity and MiMo-V2: outputs of the models that they are made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from converted_files import File, check_outputs, output, write_file

from nanovllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

FULL, SLIDING = "full_attention", "sliding_attention"
FILES = [
    File("minimax-m2", "MiniMax-M2"),
    File(
        "afmoe", "Trinity",
        dict(num_hidden_layers=4, layer_types=[*[SLIDING] * 3, FULL], moe_intermediate_size=32),
    ),
    File("mimo2", "MiMo-V2", dict(num_hidden_layers=3)),
]  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.sample)
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    check_outputs(file, tmp_path)


def test_layers_of_mimo_that_predict_later_tokens_are_left_out(tmp_path: Path) -> None:
    """They have windows, and count as some of the layers in each list."""
    model = FILES[2].write_model(tmp_path)
    tokens, _ = output(model)
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(64, 128), "blk.3.attn_q.weight": torch.ones(8)}
    lists: dict[str, Any] = {
        "attention.head_count_kv": [1, 2, 2, 2], "attention.sliding_window_pattern": [0, 1, 1, 1],
    }  # fmt: skip
    path = write_file(model, "mimo2", more=more, block_count=4, nextn_predict_layers=1, **lists)
    assert output(path)[0] == tokens


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (FILES[0], {"expert_gating_func": 1}), (FILES[0], {"leading_dense_block_count": 1}),
        (FILES[1], {"expert_weights_norm": False}), (FILES[1], {"expert_group_count": 4}),
        (FILES[1], {"attention.sliding_window_pattern": 3}),
        (FILES[2], {"expert_weights_scale": 2.5}),
        (FILES[2], {"attention.head_count_kv": [1, 2, 4]}),
        (FILES[2], {"attention.sliding_window_pattern": [0, 1]}),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused(
    file: File, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_file(file.write_model(tmp_path), file.architecture, **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(path), device="cpu")
