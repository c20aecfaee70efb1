"""Models in GGUF files: configs, names, the order of rows, and what they generate."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.layers.rope_types import scaled_frequencies
from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.loader import read_weights

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.25, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.0, 3.5, 4.0, 5.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
# What differs from model to model: the family, and fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("Llama", dict(rope_parameters=LLAMA3, max_position_embeddings=16384)),
    "Llama, tied": ("Llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "Llama with biases": (
        "Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LINEAR)
    ),
    "Mistral": ("Mistral", dict(sliding_window=8, head_dim=32)),
    "Qwen2": ("Qwen2", dict(rope_parameters=YARN)),
    "Qwen3": ("Qwen3", dict(head_dim=32)),
    "Qwen3Moe": ("Qwen3Moe", dict(norm_topk_prob=True)),
    "Phi3": ("Phi3", dict(sliding_window=8)),
    "Phi3, long": (
        "Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=64,
                     max_position_embeddings=512),
    ),
    "OLMo 2": ("Olmo2", dict(rms_norm_eps=1e-5)),
    "OLMo 3": (
        "Olmo3", dict(
            num_hidden_layers=4, sliding_window=8, rope_parameters={
                "full_attention": {**YARN, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        ),
    ),
    "Granite": (
        "Granite", dict(embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.5,
                        attention_multiplier=0.25),
    ),
    "Seed-OSS": ("SeedOss", dict(attention_bias=True, attention_out_bias=True)),
    "EXAONE 4": ("Exaone4", dict(num_hidden_layers=3, sliding_window=8, sliding_window_pattern=2)),
    "EXAONE 4, no windows": (
        "Exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 2,
                        rope_parameters=LLAMA3, max_position_embeddings=16384),
    ),
    "ERNIE 4.5": ("Ernie4_5", dict(use_bias=True, tie_word_embeddings=True)),
    "GLM 4": ("Glm4", dict(attention_bias=True)),
    "HunYuan": ("HunYuanDenseV1", dict(head_dim=32)),
    "Command R+": ("Cohere", dict(use_qk_norm=True, tie_word_embeddings=True, logit_scale=0.5)),
    "Command R7B": (
        "Cohere2", dict(num_hidden_layers=4, sliding_window=8, tie_word_embeddings=True)
    ),
    "SmolLM3": ("SmolLM3", dict(num_hidden_layers=4, no_rope_layer_interval=4)),
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a model and its GGUF file, once for all tests."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            family, fields = MODELS[name]
            path = made[name] = tmp_path_factory.mktemp("gguf")
            make_model(path, family=family, **fields)
            write_gguf(path, path / "model.gguf")
        return made[name]

    return write


@pytest.mark.parametrize("name", MODELS)
def test_the_config_is_the_originals(written: Any, name: str) -> None:
    """A field of the metadata that is not read, or read into another field."""
    path = written(name)
    original = ModelConfig.from_dir(path)
    found = ModelConfig.from_dir(gguf_directory(path / "model.gguf"))
    assert found.architecture == original.architecture
    differing = {
        field: (getattr(found, field), getattr(original, field))
        for field in ModelConfig.__dataclass_fields__
        if getattr(found, field) != getattr(original, field)
    }
    rope = [dict(c.rope_parameters) for c in (found, original)]
    for parameters in rope:  # 1.0 is the default; absent for models that rotate whole heads
        parameters.setdefault("partial_rotary_factor", 1.0)
    assert rope[0] == rope[1]
    assert {*differing} <= {"rope_parameters"}


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_the_originals(written: Any, name: str) -> None:
    """A name without its module, or rows in the converter's order."""
    path = written(name)
    originals = {n: t for file in read_weights(path) for n, t in file.items()}
    files = [*read_weights(gguf_directory(path / "model.gguf"))]
    assert len(files) == 1 and files[0].keys() == originals.keys()
    for each, tensor in files[0].items():
        assert (tensor.dtype, tensor.shape) == ("F32", originals[each].shape)
        assert torch.equal(tensor[...], originals[each][...]), each
        part = (slice(4, 12), slice(8, 24))[: len(tensor.shape)]
        assert torch.equal(tensor[part], originals[each][part]), each


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_is_that_of_transformers(written: Any, name: str) -> None:
    """What the metadata does not say and the family assumes otherwise."""
    path = written(name)
    prompts = [[*range(40, 40 + n)] for n in (3, 30)]
    llm = LLM(str(path / "model.gguf"), enforce_eager=True, max_model_len=64, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.close()
    reference = AutoModelForCausalLM.from_pretrained(path)
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None,
            attention_mask=torch.ones_like(ids), pad_token_id=0,
        )  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()


def test_a_split_model_is_one_model(written: Any, tmp_path: Path) -> None:
    path = written("Qwen3")
    write_gguf(path, tmp_path / "m.gguf", split=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    originals = {n: t for file in read_weights(path) for n, t in file.items()}
    files = [*read_weights(gguf_directory(parts[0]))]
    assert len(files) == len(parts)
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert found.keys() == originals.keys()
    assert all(torch.equal(found[name][...], originals[name][...]) for name in found)
    with pytest.raises(ValueError, match=rf"is part 2 of a model; give .*{parts[0].name}"):
        gguf_directory(parts[1])
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ValueError, match="is part 1 of"):
        gguf_directory(parts[0])
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {parts[1].name}"):
        gguf_directory(parts[0])


def test_other_factors_of_the_rotation_are_kept(tmp_path: Path) -> None:
    """Only Llama's usual ones have a config of their own."""
    rope = LLAMA3 | dict(low_freq_factor=2.0, original_max_position_embeddings=1024)
    fields = dict(rope_parameters=rope, num_hidden_layers=1, max_position_embeddings=2048)
    make_model(tmp_path, family="Llama", **fields)
    write_gguf(tmp_path, tmp_path / "m.gguf")
    found = ModelConfig.from_dir(gguf_directory(tmp_path / "m.gguf"))
    assert found.rope_parameters["rope_type"] == "longrope"
    inv_freq = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    for length in (100, 2048):
        (ours, scale), (theirs, _) = (
            scaled_frequencies(inv_freq, length, 2048, parameters)
            for parameters in (found.rope_parameters, rope)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        assert scale == 1.0


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F64", "bfloat16")]
)
def test_plain_types_are_read(written: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    path = written("Llama, tied")
    exact = write_gguf(path, tmp_path / "m.gguf", kind)
    directory = gguf_directory(tmp_path / "m.gguf")
    assert ModelConfig.from_dir(directory).dtype == dtype
    (tensors,) = read_weights(directory)
    assert {t.dtype for t in tensors.values() if len(t.shape) > 1} == {kind}
    assert all(torch.equal(tensors[name][...].float(), exact[name]) for name in exact)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "IQ4_NL"])
def test_blocks_are_read(written: Any, tmp_path: Path, kind: str) -> None:
    """Bytes in another order, or rows of other experts or heads."""
    for name in ("Llama 3", "Qwen3Moe"):
        file = tmp_path / f"{name}.gguf"
        exact = write_gguf(written(name), file, kind)
        (tensors,) = read_weights(gguf_directory(file))
        assert tensors.keys() == exact.keys()
        config = json.loads((gguf_directory(file) / "config.json").read_text())
        listed = config["quantization_config"]["types"]
        assert listed.keys() == {kind}
        stored = {each.removesuffix(".weight") for each, t in tensors.items() if t.dtype == kind}
        tied = {"lm_head"} if config["tie_word_embeddings"] else set()
        assert {*listed[kind]} == tied | {re.sub(r"experts\.\d+", "experts.*", n) for n in stored}
        for each, tensor in tensors.items():
            if tensor.dtype != kind:
                continue
            assert tensor.shape[:1] == exact[each].shape[:1] and len(tensor.shape) == 3
            codes = tensor[2:30]
            assert codes.dtype == torch.uint8
            values = dequantize(codes.flatten(1).numpy(), GGMLQuantizationType[kind])
            assert torch.equal(torch.from_numpy(values), exact[each][2:30])
