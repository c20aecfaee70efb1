"""GGUF files of models with states: logits and tokens of the models that they are made of."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LogitRecorder
from families import SAMPLES
from families.describe import write
from hybrid_files import write_file

from nanovllm import LLM, SamplingParams
from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


@dataclass(frozen=True)
class File:
    """An architecture of GGUF, the sample of a model, and other values for some of its fields.

    Rows must have a multiple of 32 weights, to be stored in blocks.
    """

    architecture: str
    sample: str
    fields: dict[str, Any] = field(default_factory=dict)

    def write_model(self, path: Path) -> Path:
        sample = SAMPLES[self.sample]
        return write(path, replace(sample, fields=sample.fields | self.fields))


WIDE = dict(intermediate_size=32, shared_intermediate_size=32)
MOE = dict(moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)
VALUES = dict(linear_value_head_dim=16)  # blocks of 32 hold weights of two heads
SHARED = dict(shared_expert_intermediate_size=32)
FILES = [
    File("lfm2", "LFM2", dict(block_multiple_of=32, tie_word_embeddings=True)),
    File("lfm2moe", "LFM2-MoE", dict(tie_word_embeddings=True)),
    File("mamba2", "Mamba 2"),
    File("granitehybrid", "Granite 4", WIDE),
    File("granitehybrid", "Granite 4, dense", dict(WIDE, shared_intermediate_size=64)),
    File("falcon-h1", "Falcon-H1", dict(mamba_d_ssm=64, mamba_n_heads=4)),
    File("falcon-h1", "Falcon-H1, gate first", dict(tie_word_embeddings=False)),
    File("nemotron_h", "Nemotron-H", dict(mamba_head_dim=16)),
    File("nemotron_h_moe", "Nemotron 3", MOE),
    File("nemotron_h_moe", "Nemotron 3, latent", dict(MOE, moe_latent_size=32, mlp_bias=False)),
    File("qwen35", "Qwen3.5", VALUES),
    File("qwen35", "Qwen3.5 tied", dict(linear_value_head_dim=16)),
    File("qwen35", "Qwen3.5", dict(linear_value_head_dim=32)),
    File("qwen35moe", "Qwen3.5 experts", VALUES | SHARED),
    File("qwen3next", "Qwen3-Next", VALUES | SHARED | dict(mlp_only_layers=[])),
]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[*range(40, 40 + n)] for n in (3, 30)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


def output(path: Path, **options: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens and logits of the prompts."""
    defaults: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)
    with LLM(str(path), max_model_len=64, **defaults | options) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [out["token_ids"] for out in outputs], [recorder.of(out) for out in outputs]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.sample} {len(file.fields)}")
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    """And files with blocks have those of the values that the blocks stand for."""
    model = file.write_model(tmp_path)
    tokens, logits = output(model)
    found, found_logits = output(write_file(model, file.architecture))
    assert found == tokens
    for one, other in zip(logits, found_logits, strict=True):
        assert (one - other).abs().max() < 1e-4
    values, logits = output(write_file(model, file.architecture, "Q8_0", decoded=True))
    blocks, found_logits = output(write_file(model, file.architecture, "Q8_0"))
    assert [each[:4] for each in blocks] == [each[:4] for each in values]
    for one, other in zip(logits, found_logits, strict=True):
        assert (one[:1] - other[:1]).abs().max() < 1e-3
    config = ModelConfig.from_dir(gguf_directory(write_file(model, file.architecture, "Q8_0")))
    original = ModelConfig.from_dir(model)
    kept = [[(layer.cache, layer.num_others) for layer in c.layers] for c in (config, original)]
    assert kept[0] == kept[1] and config.eos_token_ids == original.eos_token_ids


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path) -> None:
    """They follow the layers of the model, and count as some of its layers."""
    file = next(file for file in FILES if file.architecture == "qwen35")
    model = file.write_model(tmp_path)
    tokens, _ = output(model)
    more = {"blk.2.nextn.eh_proj.weight": torch.ones(64, 128), "blk.2.attn_q.weight": torch.ones(8)}
    path = write_file(model, "qwen35", more=more, block_count=3, nextn_predict_layers=1)
    assert output(path)[0] == tokens


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (FILES[0], {"shortconv.l_cache": 0}), (FILES[0], {"attention.head_count_kv": [2, 2]}),
        (FILES[1], {"expert_gating_func": 1}), (FILES[1], {"expert_weights_scale": 2.5}),
        (FILES[0], {"attention.sliding_window": [0, 8, 8]}),
        (FILES[2], {"ssm.dt_b_c_rms": True}), (FILES[3], {"rope.scaling.finetuned": True}),
        (FILES[8], {"expert_gating_func": 1}), (FILES[-1], {"expert_weights_norm": False}),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused(
    file: File, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_file(file.write_model(tmp_path), file.architecture, **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(path), device="cpu")
