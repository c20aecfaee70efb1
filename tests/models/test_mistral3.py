"""The text of models of Mistral that also see: names of tensors, and what text_config may say."""

import json
import logging
from pathlib import Path

import pytest
from families import SAMPLES
from families.describe import write
from reference import make_llm
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}  # fmt: skip


def tokens(path: Path) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(path) as llm:
        return llm.generate([[5, 200, 7]], params, use_tqdm=False)[0].token_ids


def test_files_may_have_the_names_of_old_and_of_new_modules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers 5 reads both; tools that save what they have loaded write the new ones."""
    path = write(tmp_path, SAMPLES["Mistral 3 whole"])
    expected, file = tokens(path), path / "model.safetensors"
    old = load_file(file)
    renamed = {
        next(new + name.removeprefix(old) for old, new in NEW.items() if name.startswith(old)): t
        for name, t in old.items()
    }
    assert "model.language_model.norm.weight" in renamed and "lm_head.weight" in renamed
    save_file(renamed, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert tokens(path) == expected
    assert "are left out" in caplog.text


def test_other_texts_are_refused(tmp_path: Path) -> None:
    raw = json.loads((write(tmp_path, SAMPLES["Mistral 3 whole"]) / "config.json").read_text())
    text = raw.pop("text_config")
    with pytest.raises(ValueError, match=r"text_config: model_type must be .* got 'mistral3'"):
        ModelConfig.parse(raw)
    with pytest.raises(
        ValueError, match=r"text_config: model_type must be .*'mistral', 'ministral3'"
    ):
        ModelConfig.parse(raw | {"text_config": text | {"model_type": "llama"}})
