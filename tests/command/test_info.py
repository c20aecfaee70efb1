"""`nanovllm info` of models that keep states or have a draft head in their files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from families import PUBLISHED, SAMPLES
from families.describe import write
from mtp_heads import add_head
from reference import make_llm

from nanovllm.command.info import describe
from nanovllm.command.main import main
from nanovllm.drafting.mtp_head import MtpHead
from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.layers.layer import Build
from nanovllm.layers.ranks import ALONE
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import made_with
from nanovllm.utils.resources import GIB

pytestmark = pytest.mark.usefixtures("one_thread")

MTP: dict[str, Any] = dict(method="mtp", num_speculative_tokens=3)


def published(path: Path, name: str) -> Path:
    (path / "config.json").write_text(json.dumps(PUBLISHED[name].file))
    return path


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_head(write(tmp_path_factory.mktemp("info"), SAMPLES["Qwen3.5"]))


@pytest.mark.parametrize("options", [{}, dict(speculative_config=MTP)], ids=["plain", "mtp"])
@pytest.mark.parametrize("cached", [True, False])
def test_as_many_tokens_fit_as_an_engine_finds(
    with_head: Path, options: dict[str, Any], cached: bool
) -> None:
    """In the same memory, without activations: with states, checkpoints, and a head's KV."""
    options = dict(options, max_num_seqs=8, enable_prefix_caching=cached, dtype="float32")
    few = dict(model=str(with_head), device="cpu", gpu_memory_utilization=0.01)
    info = describe(few | options)
    weights = info["weight_bytes"] + (info["draft_head"] or {}).get("weight_bytes", 0)
    memory = (int(8 * GIB * 0.01) - weights) / GIB
    with make_llm(with_head, num_kvcache_blocks=None, cpu_kvcache_gib=memory, **options) as llm:
        found = llm.config.num_kvcache_blocks * llm.config.kvcache_block_size
    assert info["kv_tokens_by_gib"][8] == pytest.approx(found, rel=0.02)
    assert set(info["num_seqs_by_gib"].values()) == {8}


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3-Next-80B-A3B"])
def test_the_size_of_a_draft_head_is_that_of_its_parameters(name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(published(tmp_path, name))
    with torch.device("meta"):
        model = made_with(config, Build(ALONE, PLAIN_FORMATS, 16))
        head = MtpHead(config, model, model.make)
    count = sum(param.numel() for param in head.parameters())
    info = describe(dict(model=str(tmp_path), device="cpu", dtype="bfloat16",
                         speculative_config=MTP))  # fmt: skip
    plain = describe(dict(model=str(tmp_path), device="cpu", dtype="bfloat16"))
    assert info["draft_head"]["num_parameters"] == count
    assert info["draft_head"]["weight_bytes"] == 2 * count
    assert info["state_bytes_per_sequence"] == 4 * plain["state_bytes_per_sequence"]
    assert plain["draft_head"] is None and plain["weight_bytes"] == info["weight_bytes"]


def test_the_command_describes_a_head(with_head: Path, capsys: Any, tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--speculative-config", json.dumps(MTP)]
    assert main(["info", str(with_head), *argv]) == 0
    assert re.search(r"\n  draft head: [\d.]+M parameters, ", capsys.readouterr().out)
    assert main(["info", str(make_model(tmp_path)), *argv]) == 1
    assert "Qwen3ForCausalLM has no draft head" in capsys.readouterr().err


def test_a_model_without_attention_has_no_heads(tmp_path: Path, capsys: Any) -> None:
    path = str(published(tmp_path, "Codestral Mamba 7B"))
    assert main(["info", path, "--device", "cpu", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "64 layers of 4096, 64 of them with states, vocabulary 32,768\n" in text
    assert "heads" not in text and "\n       24 GiB             21\n" in text
    info = describe(dict(model=path, device="cpu"))
    assert info["heads"] == [] and info["num_attention_heads"] is info["head_dim"] is None
    assert info["num_layers_with_states"] == 64 and info["kv_tokens_by_gib"] == {}


def test_a_model_whose_sums_have_no_order_here_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an engine refuses it."""
    path = published(tmp_path, "DeepSeek-V2-Lite")
    flags = ["info", str(path), "--device", "cpu", "--enable-lora"]
    assert main(flags) == 0
    assert main([*flags, "--batch-invariant"]) == 1
    assert "not supported: batch_invariant=True does not yet hold" in capsys.readouterr().out
