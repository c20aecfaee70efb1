"""Loading a tokenizer, also where transformers cannot parse the model's config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import edit_config, make_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Qwen3", dict(rms_norm_eps=1)),  # an int where transformers 5 wants a float
        ("Qwen3", dict(sliding_window="unused")),
        ("Llama", dict(num_attention_heads=6, num_key_value_heads=2)),  # 64 is no multiple of 6
        ("Qwen3", dict(model_type="a-new-type")),
        ("Qwen3", dict(model_type=None)),
    ],
)
def test_a_config_that_only_transformers_refuses_does_not_stop_the_tokenizer(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    path = make_model(tmp_path, family=family)
    expected = load_tokenizer(None, path).encode("Hello <|eos|>")
    edit_config(path, **fields)
    ModelConfig.from_dir(path)
    assert load_tokenizer(None, path).encode("Hello <|eos|>") == expected


def test_a_model_whose_config_only_transformers_refuses_generates_text(
    model_dir: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(model_dir, tmp_path / "copy")
    edit_config(path, rms_norm_eps=1)
    with LLM(path, device="cpu", num_kvcache_blocks=8) as llm:
        (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert output["num_prompt_tokens"] == 1


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}', "[]"])
@pytest.mark.parametrize("has_config", [True, False])
def test_a_damaged_tokenizer_is_named(
    model_dir: Path, tmp_path: Path, text: str, has_config: bool
) -> None:
    path = shutil.copytree(model_dir, tmp_path / "copy")
    (path / "tokenizer.json").write_text(text)
    if not has_config:
        (path / "config.json").unlink()
    with pytest.raises(OSError, match="cannot load the tokenizer of") as caught:
        load_tokenizer(None, path)
    assert str(path) in str(caught.value)
    assert "config.json" not in str(caught.value).replace("tokenizer_config.json", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", b"[]"), ("tokenizer.json", b"{"), ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"5"), ("tokenizer_config.json", b"[" * 100_000),
        ("config.json", b"[]"), ("chat_template.jinja", b"\xff"),
    ],
)  # fmt: skip
def test_the_damaged_file_of_a_tokenizer_is_named(
    model_dir: Path, tmp_path: Path, name: str, text: bytes
) -> None:
    path = shutil.copytree(model_dir, tmp_path / "copy")
    (path / name).write_bytes(text)
    for tokenizer in (None, str(path)):
        with pytest.raises(OSError, match="cannot load the tokenizer of") as caught:
            load_tokenizer(tokenizer, path)
        assert f"{path / name} " in str(caught.value)


def test_a_tokenizer_needs_no_config_beside_it(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load_tokenizer(str(tmp_path), model_dir).encode("a") == [
        json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    ]
