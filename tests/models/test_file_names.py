"""Errors of the loader name a tensor as the files do, where a family has other names for it."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from families import SAMPLES
from families.describe import write
from safetensors.torch import load_file, save_file

from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Models = Callable[[str], tuple[Path, Tensors]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Writes a sample when it is first needed."""
    made: dict[str, tuple[Path, Tensors]] = {}

    def make(name: str) -> tuple[Path, Tensors]:
        if name not in made:
            path = write(tmp_path_factory.mktemp("names"), SAMPLES[name])
            made[name] = path, load_file(path / FILE)
        return made[name]

    return make


def refused(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """What the loader says of files with these tensors."""
    save_file(dict(tensors), path / FILE, metadata={"format": "pt"})
    model = build_model(ModelConfig.from_dir(path), max_positions=16)
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        load_model(model, path)
    assert str(raised.value).startswith(f"{path}: ")
    return str(raised.value).removeprefix(f"{path}: ")


LFM2, NEMOTRON = "LFM2-MoE", "Nemotron-H"
BIAS = "model.layers.2.feed_forward.expert_bias"


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        (LFM2, BIAS),
        (LFM2, "model.layers.2.feed_forward.experts.3.w3.weight"),
        (LFM2, "model.layers.1.self_attn.out_proj.weight"),
        (LFM2, "model.embedding_norm.weight"),
        ("GPT-2", "transformer.h.1.attn.c_attn.weight"),
        ("Qwen3.5 whole", "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),
    ],
)
def test_a_missing_tensor_has_its_name_in_files(models: Models, sample: str, name: str) -> None:
    path, tensors = models(sample)
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    assert len(rest) == len(tensors) - 1
    assert refused(path, rest) == f"the files lack {name}"


def test_a_missing_tensor_has_the_prefix_of_the_files(models: Models) -> None:
    """Where files of a family have different ones."""
    path, tensors = models(NEMOTRON)
    for above in ("model.", "backbone."):
        spelt = {re.sub(r"^(model|backbone)\.", above, name): tensors[name] for name in tensors}
        for name in (f"{above}embeddings.weight", f"{above}layers.0.norm.weight"):
            rest = {other: tensor for other, tensor in spelt.items() if other != name}
            assert len(rest) == len(spelt) - 1
            assert refused(path, rest) == f"the files lack {name}"


@pytest.mark.parametrize("name", [BIAS, "model.embedding_norm.weight"])
def test_a_wrong_tensor_has_its_name_in_files(models: Models, name: str) -> None:
    path, tensors = models(LFM2)
    wrong = {"has shape (3,)": torch.ones(3), "has type I32": tensors[name].int()}
    for says, tensor in wrong.items():
        assert f"tensor {name!r} {says}" in refused(path, tensors | {name: tensor})


@pytest.mark.parametrize("end", ["w4.weight", "w1.bias", "w1.weight_scale"])
def test_an_unexpected_tensor_has_its_name_in_files(models: Models, end: str) -> None:
    path, tensors = models(LFM2)
    name = f"model.layers.0.feed_forward.{end}"
    message = refused(path, tensors | {name: torch.ones(3)})
    assert message.startswith(f"unexpected tensor {name!r}")
