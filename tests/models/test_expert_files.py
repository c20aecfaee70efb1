"""The names of experts' tensors: those of published files, and those of transformers' modules."""

from pathlib import Path

import pytest
import torch
from families.describe import write
from families.experts import SAMPLES
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(path: Path) -> CausalLM:
    model = build_model(ModelConfig.from_dir(path), 16)
    load_model(model, path)
    return model


@pytest.mark.parametrize("name", ["Mixtral", "GraniteMoE", "Phi-3.5-MoE", "Qwen2-MoE", "OLMoE"])
def test_files_may_have_the_names_of_transformers_modules(name: str, tmp_path: Path) -> None:
    """Tools that save a state dict do not translate names back; experts are then stacked."""
    path = write(tmp_path, SAMPLES[name])
    expected = loaded(path)
    tensors = AutoModelForCausalLM.from_pretrained(path).state_dict()
    (path / "model.safetensors").unlink()
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors")
    for one, other in zip(expected.parameters(), loaded(path).parameters(), strict=True):
        assert torch.equal(one, other)
