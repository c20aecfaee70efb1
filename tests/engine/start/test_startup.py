"""What startup logs about the model and its memory, and how many threads it chooses."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model

from nanovllm import LLM
from nanovllm.command.info import describe
from nanovllm.engine.start import placement
from nanovllm.utils.resources import memory_text


def log_of(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "nanovllm"),
        LLM(device="cpu", num_kvcache_blocks=8, kvcache_block_size=16, **options),
    ):
        return caplog.messages


def test_the_log_says_how_weights_and_kv_are_kept(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(log_of(caplog, model=model_dir, dtype="float32"))
    assert "on cpu in float32, " in text and "; quantized: no; " in text
    assert "KV cache in float32: 128 tokens" in text
    options: dict[str, Any] = dict(quantization="int4", kv_cache_dtype="fp8", dtype="bfloat16")
    text = "\n".join(log_of(caplog, model=model_dir, **options))
    assert "quantized: 4-bit, groups of 32; 8-bit, a scale for each" in text
    assert "KV cache in float8_e4m3fn: 128 tokens" in text


def test_the_log_says_that_nothing_is_quantized_if_only_the_kv_cache_has_scales(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dict(quant_method="compressed-tensors", format="dense", config_groups={})
    make_model(tmp_path, quantization_config=config)
    text = "\n".join(log_of(caplog, model=tmp_path, load_format="dummy"))
    assert "; quantized: no; " in text


@pytest.mark.parametrize("tied", [True, False])
def test_the_logged_memory_counts_the_quantized_copy_of_a_tied_head(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A large vocabulary, so that the head decides."""
    sizes = dict(vocab_size=20_000, hidden_size=128, tie_word_embeddings=tied)
    options: dict[str, Any] = dict(dtype="bfloat16", quantization="int4")
    options["model"] = str(make_model(tmp_path / "model", **sizes))
    text = "\n".join(log_of(caplog, **options))
    found = re.search(r"([\d.]+) MiB loaded", text)
    assert found, text
    expected = describe(dict(options, device="cpu"))["weight_bytes"] / 2**20
    assert float(found[1]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (123_000, "0.1 MiB"),
        (5 << 20, "5.0 MiB"),
        (1 << 29, "0.500 GiB"),
        (3 << 40, "3,072.000 GiB"),
    ],
)
def test_memory_is_in_mib_where_gib_would_be_zeros(num_bytes: int, text: str) -> None:
    assert memory_text(num_bytes) == text


@pytest.mark.parametrize(("allowed", "expected"), [(1, 1), (2, 2), (100, 2)])
@pytest.mark.usefixtures("two_threads")
def test_steps_take_no_more_threads_than_the_quota_allows(
    allowed: int, expected: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "allowed_cores", lambda: allowed)
    with LLM(model_dir, device="cpu", num_kvcache_blocks=8) as llm:
        with llm.model_runner.shard.computing():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
