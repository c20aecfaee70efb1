"""Quantized checkpoints: they load, and give the outputs of the weights that they stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from conftest import edit_config, make_model
from families import SAMPLES
from families.describe import write
from gguf_files import write_gguf
from reference import make_llm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.quality import logprobs
from nanovllm import SamplingParams
from nanovllm.command.main import main
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.layers.context import STATES, attending
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model
from nanovllm.quantize import files, job, walk
from nanovllm.quantize.calibration import Calibration
from nanovllm.quantize.checkpoint import quantize_checkpoint
from nanovllm.quantize.codes import Codes
from nanovllm.quantize.gptq import gptq
from nanovllm.quantize.job import Summary
from nanovllm.quantize.options import QuantizeOptions
from nanovllm.quantize.plan import read_sources
from nanovllm.quantize.text import read_samples

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "".join(f"{i} and {i * i % 97} make {i + i * i % 97}; " for i in range(200))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[*range(40, 40 + n)] for n in (1, 19)]


def quantized(model: Path, **options: Any) -> tuple[Path, Summary]:
    """The model in a directory of its own, and what was done."""
    text, out = model.parent / "text.txt", model.parent / f"quantized-{options.get('method')}"
    text.write_text(TEXT)
    given = dict(text=[str(text)], num_samples=6, max_length=48) | options
    chosen = QuantizeOptions(model=str(model), out=str(out), device="cpu", **given)
    return out, quantize_checkpoint(chosen)


def stands_for(path: Path, group: int = 32) -> Path:
    """A plain checkpoint in float32 with the values of a quantized one."""
    found, stored = path.with_name(f"{path.name}-plain"), {}
    shutil.copytree(path, found)
    for file in found.glob("*.safetensors"):
        stored |= load_file(file)
        file.unlink()
    values = {n: t for n, t in stored.items() if "weight_" not in n and f"{n}_scale" not in stored}
    for name in (n.removesuffix("_scale") for n in stored if n.endswith("weight_scale")):
        scales = stored[f"{name}_scale"].float()
        if f"{name}_packed" not in stored:
            values[name] = stored[name].float() * scales
            continue
        shape = torch.Size(stored[f"{name}_shape"].tolist())
        bits = 4 if scales.shape[1] > 1 else 8
        codes = unpack_from_int32(stored[f"{name}_packed"], bits, shape).float()
        size = group if bits == 4 else shape[1]
        values[name] = codes * scales.repeat_interleave(size, 1)[:, : shape[1]]
    (found / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(values, found / "model.safetensors", {"format": "pt"})
    edit_config(found, quantization_config=None)
    return found


def outputs(path: Path) -> list[list[int]]:
    with make_llm(path) as llm:
        return [out.token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "name", ["Llama", "Granite, tied, with biases", "Phi-3.5-MoE", "Qwen3.5", "Gemma 3n"]
)
def test_output_is_that_of_the_weights(name: str, tmp_path: Path) -> None:
    """Tied, with experts, with states, with keys that layers share."""
    path, summary = quantized(write(tmp_path / "model", SAMPLES[name]))
    assert summary.by_gptq and not summary.rounded
    assert bool(summary.of_experts) == ("MoE" in name)
    assert outputs(path) == outputs(stands_for(path))


@pytest.mark.parametrize("format_", ["int8", "fp8", "rtn"])
def test_formats_without_a_text(format_: str, tmp_path: Path) -> None:
    options = dict(method="rtn") if format_ == "rtn" else dict(format=format_)
    path, summary = quantized(make_model(tmp_path / "model"), text=[], **options)
    assert (summary.by_gptq, summary.rounded) == (0, 14)
    assert outputs(path) == outputs(stands_for(path))


def test_odd_sizes(tmp_path: Path) -> None:
    """Inputs that no group and no word divides; the summary names what vLLM does not load."""
    sizes = dict(hidden_size=60, intermediate_size=101, head_dim=12)
    path, summary = quantized(make_model(tmp_path / "model", **sizes))
    assert len(summary.uneven) == 14
    assert outputs(path) == outputs(stands_for(path))


def test_files_that_fuse_projections(tmp_path: Path) -> None:
    path, _ = quantized(write(tmp_path / "model", SAMPLES["Glm4"]))
    assert any("gate_up_proj.weight_packed" in n for n in load_file(path / "model.safetensors"))
    assert outputs(path) == outputs(stands_for(path))


def test_several_files_and_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index; the tokenizer's files are there, and files that the config names are plain."""
    monkeypatch.setattr(files, "SHARD", 40_000)
    model = make_model(tmp_path / "model", shards=True)
    path, _ = quantized(model)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert {*index} == {n for file in path.glob("*.safetensors") for n in load_file(file)}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (path / name).read_bytes() == (model / name).read_bytes()
    assert outputs(path) == outputs(stands_for(path))


@pytest.mark.parametrize("format_", ["int4", "int8", "fp8"])
def test_transformers_reads_the_same_weights(format_: str, tmp_path: Path) -> None:
    """With the library compressed-tensors, by which vLLM reads the config, too."""
    options: dict[str, Any] = {} if format_ == "int4" else dict(format=format_, text=[])
    path, _ = quantized(make_model(tmp_path / "model", family="Llama"), **options)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert QuantizationConfig.model_validate(config).ignore == ["lm_head"]
    assert config["quant_method"] == "compressed-tensors"
    if format_ == "fp8":  # there, inputs are rounded too
        return
    with torch.inference_mode():
        found, exact = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(
                torch.tensor(PROMPTS[1:])
            ).logits
            for each in (path, stands_for(path))
        )
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_calibration_helps_a_trained_model(tmp_path: Path) -> None:
    """On sums that are not in the text. Random models gain little: their inputs do not depend."""
    model, text = tmp_path / "model", tmp_path / "sums.txt"
    shutil.copytree(EMBEDDED_MODEL, model)
    problems = [f"{question}{answer}\n" for question, answer in sample_problems(800)]
    text.write_text("".join(problems[:700]))
    found = []
    for options in (dict(text=[str(text)], num_samples=64), dict(method="rtn", text=[])):
        path, _ = quantized(model, **options)
        found.append(path)
    prompt = "".join(problems[700:])
    exact, *others = (log_probabilities(path, prompt) for path in (model, *found))
    by_gptq, by_rounding = ((exact - other).abs().mean().item() for other in others)
    assert by_gptq < 0.7 * by_rounding


def log_probabilities(path: Path, prompt: str) -> torch.Tensor:
    with make_llm(path, dtype="float32") as llm:
        return logprobs(llm, list(llm.tokenizer.encode(prompt)))


@pytest.mark.parametrize("name", ["Llama", "Qwen3.5", "Gemma 3n", "Phi-3.5-MoE"])
def test_a_walk_computes_what_the_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block, and each of them twice: a chunk never has what belongs to another."""
    monkeypatch.setattr(walk, "CHUNK", 32)
    path, cpu = write(tmp_path / "model", SAMPLES[name]), torch.device("cpu")
    model = build_model(ModelConfig.from_dir(path), 64)
    with torch.no_grad():
        load_model(model, path)
    model.bind(walk.BACKEND)
    walk.give_states(model, cpu, torch.float32)
    samples = [[*range(40, 40 + n)] for n in (5, 30, 17, 15)]
    expected = [hidden(model, walk.Chunk([sample], cpu)) for sample in samples]
    walked = walk.Walk(model, samples, cpu)
    for _ in model.model.layers:
        walked.collect()
        walked.move()
    assert len(walked.chunks) == 3
    found = torch.cat([walked.end(chunk) for chunk in walked.chunks])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_a_block_is_calibrated_for_what_it_will_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the outputs of blocks that are quantized already."""
    seen: list[torch.Tensor] = []

    def recording(weight: torch.Tensor, products: torch.Tensor, *args: Any) -> Codes:
        seen.append(products)
        return gptq(weight, products, *args)

    monkeypatch.setattr(job, "gptq", recording)
    path, _ = quantized(make_model(tmp_path / "model"))
    exact, names = stands_for(path), ["qkv_proj", "o_proj"]
    model = build_model(ModelConfig.from_dir(exact), 48)
    sources = read_sources(model, exact)
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = read_samples(tokenizer, [tmp_path / "text.txt"], 6, 48)
    calibration = Calibration(model, samples, torch.device("cpu"))
    calibration.fill_outside(each for each in sources if each.block is None)
    for block in range(2):
        own = [each for each in sources if each.block == block]
        modules = [f"model.layers.{block}.self_attn.{name}" for name in names]
        found = calibration.products(block, own, modules)
        calibration.move(block)
    inputs = found[modules[0]]
    assert any(each.shape == inputs.shape and torch.allclose(each, inputs) for each in seen)


@torch.inference_mode()
def hidden(model: CausalLM, chunk: walk.Chunk) -> torch.Tensor:
    """The hidden states of a chunk, by the model's own `forward`."""
    with attending(chunk.context, walk.BACKEND.attention, {STATES: chunk.states}):
        return model(chunk.ids, chunk.positions)[0]


def test_a_gguf_file(tmp_path: Path) -> None:
    """Its weights were rounded before: they are rounded again only if that is asked for."""
    file = tmp_path / "model.gguf"
    write_gguf(make_model(tmp_path / "saved", family="Llama"), file, "Q8_0")
    refusal(ValueError, "were rounded when it was made", file)
    path, summary = quantized(file, dequantize=True)
    plain = stands_for(path)
    assert summary.by_gptq == 14
    assert outputs(path) == outputs(plain)
    path.rename(tmp_path / "first")
    plain.rename(tmp_path / "second")
    refusal(ValueError, "is for GGUF files", tmp_path / "saved", dequantize=True)


# What is refused


def refusal(error: type[Exception], words: str, model: Path, **options: Any) -> None:
    with pytest.raises(error, match=words):
        quantized(model, **options)
    assert not [each for each in model.parent.iterdir() if "quantized" in each.name]


def test_bad_options() -> None:
    for words, options in {
        "method 'gptq' needs a calibration text": {},
        "a text has an effect only with": dict(text=["t"], method="rtn"),
        "group_size=32 is for format='int4'": dict(format="fp8", group_size=32),
        "method='gptq' is for format='int4'": dict(format="int8", method="gptq"),
        "group_size must be one of 32, 64, 128": dict(text=["t"], group_size=48),
        "format must be one of": dict(format="int3"),
        "num_samples must be >= 1": dict(text=["t"], num_samples=0),
        "max_length must be >= 8": dict(text=["t"], max_length=7),
    }.items():
        with pytest.raises(ValueError, match=words):
            QuantizeOptions(model="m", out="o", **options)


def test_bad_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\xff")
    refusal(ValueError, "the text has no tokens", model, text=[str(empty)])
    refusal(ValueError, "is not valid UTF-8", model, text=[str(binary)])
    refusal(FileNotFoundError, "nowhere", model, text=[str(tmp_path / "nowhere.txt")])
    stored = load_file(model / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    refusal(ValueError, "the files lack model.layers.1.mlp.up_proj.weight", model)
    save_file(stored | {"model.layers.1.x": torch.zeros(1)}, model / "model.safetensors")
    refusal(ValueError, "unexpected tensor 'model.layers.1.x'", model)


def test_what_exists_already(tmp_path: Path) -> None:
    """A directory, and a checkpoint that is quantized."""
    path, _ = quantized(make_model(tmp_path / "model"))
    with pytest.raises(FileExistsError, match="exists already"):
        quantized(tmp_path / "model")
    path.rename(tmp_path / "other")
    refusal(ValueError, "is quantized already, by 'compressed-tensors'", tmp_path / "other")


def test_a_model_without_usual_layers(tmp_path: Path) -> None:
    """GPT-2's files have transposed weights, which the formats do not."""
    model = write(tmp_path / "model", SAMPLES["GPT-2"])
    refusal(ValueError, "no linear layers that can be quantized", model)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    refusal(ValueError, "has no tokenizer, which the calibration text needs", model)
    path, _ = quantized(model, method="rtn", text=[])
    assert (path / "config.json").exists()


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And lists what it needs, before it imports anything slow."""
    model, text = make_model(tmp_path / "model", family="Qwen3Moe"), tmp_path / "text.txt"
    text.write_text(TEXT)
    argv = ["quantize", "--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*argv, "--text", str(text), str(text), "--max-length", "40"]) == 0
    said = capsys.readouterr().out
    assert "8 matrices by GPTQ, with 128 parts of the text, 5,120 tokens" in said
    assert "48 matrices of experts rounded to the nearest code" in said
    assert "linear layers left plain: 3 (lm_head, model.layers.0.mlp.gate," in said
    assert main(argv) == 2
    assert "needs a calibration text (--text)" in capsys.readouterr().err
    assert main(argv[:3]) == 2
    assert "--out is required" in capsys.readouterr().err
