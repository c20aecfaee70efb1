"""A rank's adapters: what it reads, and what it keeps."""

import shutil
from pathlib import Path

import pytest
import torch
from adapter_files import write_adapter
from conftest import make_model

from nanovllm.adapters.adapter import number_of
from nanovllm.adapters.parts import AdapterPart
from nanovllm.config import Config
from nanovllm.engine.start.placement import resolve_placement
from nanovllm.layers.ranks import ALONE
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"model.layers.0.self_attn.q_proj": (64, 64)}


@pytest.fixture
def parts(tmp_path: Path) -> AdapterPart:
    path = make_model(tmp_path / "model")
    config = ModelConfig.from_dir(path)
    placement = resolve_placement(Config(str(path), device="cpu"), config, ALONE)
    with torch.inference_mode():
        model = build_model(config, 64)
        load_model(model, path)
    return AdapterPart(model, placement, 2, 8, 2)


def test_files_that_have_changed_are_an_error_on_every_rank(
    parts: AdapterPart, tmp_path: Path
) -> None:
    """Else a rank would compute with another adapter than the others."""
    path = write_adapter(tmp_path / "adapter", SHAPES)
    number = number_of(path)
    shutil.rmtree(path)
    write_adapter(path, SHAPES, seed=1)
    for read in (
        lambda: parts.read(path, number),
        lambda: parts.keep(number, path),  # ranks other than 0
        lambda: parts.place(0, number, path),  # rank 0, if the store has dropped it
    ):
        with pytest.raises(ValueError, match="adapter': the files have changed"):
            read()
    assert not parts.tensors


def test_a_rank_keeps_the_adapters_that_were_used_last(parts: AdapterPart, tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / f"{i}", SHAPES, seed=i) for i in range(3)]
    numbers = [number_of(path) for path in paths]
    for index in (0, 1, 0, 2):
        parts.keep(numbers[index], paths[index])
    assert [*parts.tensors] == [numbers[0], numbers[2]]
