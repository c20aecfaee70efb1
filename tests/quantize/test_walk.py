"""The text's way through a model, block after block, and what is calibrated by it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from families import SAMPLES
from families.describe import write
from reference import make_llm
from saved_checkpoints import quantized, stands_for
from transformers import AutoTokenizer

from benchmarks.quality import logprobs
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.layers.context import STATES, attending
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model
from nanovllm.quantize import job, walk
from nanovllm.quantize.calibration import Calibration
from nanovllm.quantize.codes import Codes
from nanovllm.quantize.gptq import gptq
from nanovllm.quantize.plan import read_sources
from nanovllm.quantize.text import read_samples

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_calibration_helps_a_trained_model(tmp_path: Path) -> None:
    """On sums that are not in the text. Random models gain little: their inputs do not depend."""
    model, text = tmp_path / "model", tmp_path / "sums.txt"
    shutil.copytree(EMBEDDED_MODEL, model)
    problems = [f"{question}{answer}\n" for question, answer in sample_problems(450)]
    text.write_text("".join(problems[:400]))
    found = []
    for options in (dict(text=[str(text)], num_samples=40), dict(method="rtn", text=[])):
        path, _ = quantized(model, **options)
        found.append(path)
    prompt = "".join(problems[400:])
    exact, *others = (log_probabilities(path, prompt) for path in (model, *found))
    by_gptq, by_rounding = ((exact - other).abs().mean().item() for other in others)
    assert by_gptq < 0.7 * by_rounding


def log_probabilities(path: Path, prompt: str) -> torch.Tensor:
    with make_llm(path, dtype="float32") as llm:
        return logprobs(llm, list(llm.tokenizer.encode(prompt)))
