"""GGUF files of Gemma 1 to 3: logits and tokens of the models that they are made of."""

from pathlib import Path

import pytest
from converted_files import File, check_outputs
from families.gemma import TIED

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

# Files say neither other scales of scores, nor which layers have a window.
USUAL = TIED | dict(query_pre_attn_scalar=16)
FILES = [
    File("gemma", "Gemma"),
    File("gemma2", "Gemma 2", USUAL),
    File("gemma3", "Gemma 3", USUAL | dict(num_hidden_layers=7, sliding_window_pattern=6)),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.sample)
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    check_outputs(file, tmp_path)
