"""The files of quantized checkpoints, other readers of them, what is refused, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from conftest import byte_tokenizer, make_model
from families import SAMPLES
from families.describe import write
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from saved_checkpoints import PROMPTS, TEXT, outputs, quantized, stands_for
from tokenizers import processors
from transformers import AutoModelForCausalLM

from nanovllm.command.main import main
from nanovllm.quantize import files
from nanovllm.quantize.options import QuantizeOptions
from nanovllm.quantize.text import read_samples

pytestmark = pytest.mark.usefixtures("one_thread")


def test_several_files_and_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index, and with the files of the tokenizer."""
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


NORM, MATRIX = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
RTN: dict[str, Any] = dict(method="rtn", text=[])


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] = value
    return changed


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (MATRIX, lambda tensor: tensor.char(), "has type I8, a model needs one of F64"),
        (MATRIX, lambda tensor: tensor[:, 1:], r"has shape \(\d+, \d+\), the model needs"),
        (NORM, lambda tensor: tensor[1:], r"has shape \(\d+,\), the model needs"),
        (NORM, lambda tensor: with_value(tensor, torch.nan), "has values that are NaN"),
    ],
    ids=["type", "shape of a matrix", "shape of a norm", "NaN"],
)
def test_tensors_that_the_loader_refuses(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
) -> None:
    """Without a text, the model itself is not filled."""
    model = make_model(tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    stored[name] = change(stored[name]).contiguous()
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    refusal(ValueError, f"tensor '{name}' {words}", model, **RTN)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """Not the inputs of a layer that reads what they give."""
    model, name = make_model(tmp_path / "model"), "model.layers.1.self_attn.v_proj.weight"
    stored = load_file(model / "model.safetensors")
    stored[name] = with_value(stored[name], torch.inf)
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    refusal(ValueError, f"tensor '{name}' has values that are NaN or infinite", model)


def test_tensors_both_fused_and_in_parts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    parts = [stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    fused = {"model.layers.0.mlp.gate_up_proj.weight": torch.cat(parts)}
    save_file(stored | fused, model / "model.safetensors", {"format": "pt"})
    refusal(ValueError, "is in two files, or both fused and in parts", model, **RTN)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    for number, tensors in enumerate((stored, {NORM: stored[NORM]})):
        save_file(tensors, model / f"{number}.safetensors", {"format": "pt"})
    (model / "model.safetensors").unlink()
    refusal(ValueError, f"tensor '{NORM}' is in two files", model, **RTN)


def test_errors_have_the_names_of_files(tmp_path: Path) -> None:
    """Not the model's own."""
    model = write(tmp_path / "model", SAMPLES["Phi-3.5-MoE"])
    stored = load_file(model / "model.safetensors")
    name = next(name for name in stored if "block_sparse_moe" in name)
    save_file({name: stored[name]}, model / "0.safetensors", {"format": "pt"})
    (model / "model.safetensors").rename(model / "1.safetensors")
    refusal(ValueError, f"tensor '{name}' is in two files", model, **RTN)


def test_a_tied_head_may_have_both_names(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=True)
    stored = load_file(model / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    path, _ = quantized(model)
    assert outputs(path) == outputs(stands_for(path))


def test_no_parents_are_left_after_an_error(tmp_path: Path) -> None:
    """Only what was there before, and what others have put there."""
    out = tmp_path / "there" / "a" / "b" / "out"
    (tmp_path / "there").mkdir()

    def interrupt(other: Path) -> None:
        with files.new_directory(out) as folder:
            (folder / "file").touch()
            other.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt(tmp_path / "other")
    assert {*tmp_path.rglob("*")} == {tmp_path / "there", tmp_path / "other"}
    with pytest.raises(KeyboardInterrupt):
        interrupt(out.parents[1] / "other")
    assert [*(tmp_path / "there").rglob("*")] == [out.parents[1], out.parents[1] / "other"]
    with files.new_directory(out) as folder:
        (folder / "file").touch()
    assert (out / "file").exists()


def test_parts_of_a_text_end_without_the_tokens_behind_prompts(tmp_path: Path) -> None:
    """Each begins with those before a prompt; some tokenizers also put tokens after it."""
    tokenizer, text = byte_tokenizer(), tmp_path / "text.txt"
    text.write_text("abcdef")
    first, last = tokenizer.pad_token, tokenizer.eos_token
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        special_tokens=[(first, tokenizer.pad_token_id), (last, tokenizer.eos_token_id)],
    )
    ids = tokenizer.encode("abcdef", add_special_tokens=False)
    expected = [[tokenizer.pad_token_id, *ids[i : i + 3]] for i in (0, 3)]
    assert read_samples(tokenizer, [text], 4, 4) == expected


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
