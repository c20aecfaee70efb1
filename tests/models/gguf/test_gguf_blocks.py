"""Models in GGUF files whose matrices are stored in blocks: they equal transformers on the values.

transformers gets the values of the blocks as plain weights.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from gguf_files import Types, every_matrix, write_gguf
from reference import audit_at_rest, make_llm
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.model_size import WeightBytes, model_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, num_hidden_layers=2,
)  # fmt: skip
PROMPTS = [[*range(40, 40 + n)] for n in (3, 30)]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=0)


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Types as llama.cpp mixes them in a file of Q4_K_M, and a plain matrix."""
    if len(shape) < 2:
        return "F32"
    if "attn_v" in name or "ffn_down" in name:
        return "Q6_K"
    if "blk.1.attn_q" in name:
        return "F16"
    return "Q8_0" if "token_embd" in name else "Q4_K"


def written(tmp_path: Path, types: Types, family: str = "Llama", **fields: Any) -> tuple[Path, Any]:
    """A model's GGUF file, and the model of transformers with the values that the file has."""
    model, file = tmp_path / "model", tmp_path / "model.gguf"
    make_model(model, family=family, **SHAPE | fields)
    exact = write_gguf(model, file, types)
    tensors = {name: tensor.contiguous() for name, tensor in exact.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return file, reference.eval()


def expected(reference: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy tokens, and the log-probabilities of the prompt's tokens from the second on."""
    ids = torch.tensor([prompt])
    tokens = reference.generate(
        ids, do_sample=False, max_new_tokens=10, min_new_tokens=10, eos_token_id=None,
        attention_mask=torch.ones_like(ids), pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        known = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return tokens[0, len(prompt) :].tolist(), known[:, 0].tolist()


def check(llm: LLM, reference: Any) -> None:
    """Compare tokens, and log-probabilities to 1e-4."""
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False), strict=True):
        tokens, known = expected(reference, prompt)
        found = [entry[0].logprob for entry in output["prompt_logprobs"][1:]]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(known), rtol=0, atol=1e-4)
        assert output["token_ids"] == tokens
    audit_at_rest(llm)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_model_of_each_type_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Embedding, layers and head in blocks."""
    file, reference = written(tmp_path, every_matrix(kind), tie_word_embeddings=kind == "Q4_0")
    with make_llm(file, max_model_len=64) as llm:
        check(llm, reference)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Qwen3Moe"])
def test_types_can_be_mixed(family: str, backend: str, tmp_path: Path) -> None:
    """Also among the projections of a fused layer, and in experts."""
    moe = dict(moe_intermediate_size=256, norm_topk_prob=True) if family == "Qwen3Moe" else {}
    file, reference = written(tmp_path, mixed, family, tie_word_embeddings=True, **moe)
    with make_llm(file, max_model_len=64, attention_backend=backend) as llm:
        check(llm, reference)
        stored = llm.model_config.quantization
        assert stored is not None and {scheme.kind.name for scheme in stored.schemes} == {
            "Q4_K", "Q6_K", "Q8_0",
        }  # fmt: skip


def test_ranks_share_blocks(tmp_path: Path) -> None:
    """Rows of a rank's part begin inside of a block of 256: those become plain weights."""
    file, reference = written(tmp_path, mixed, tie_word_embeddings=True)
    with make_llm(file, max_model_len=64, tensor_parallel_size=2) as llm:
        check(llm, reference)


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["Llama", "Phi3", "Qwen3Moe"])
def test_blocks_are_multiplied_on_a_gpu(family: str, tmp_path: Path) -> None:
    """With decode graphs, and experts that become plain there."""
    moe = dict(moe_intermediate_size=256, norm_topk_prob=True) if family == "Qwen3Moe" else {}
    file, reference = written(tmp_path, mixed, family, tie_word_embeddings=True, **moe)
    on_gpu = dict(max_model_len=64, device="cuda", num_kvcache_blocks=64)
    with make_llm(file, **on_gpu) as llm:
        check(llm, reference)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_values_in_bfloat16_are_near(device: str, tmp_path: Path) -> None:
    """The kernels for bfloat16 round inputs less than bfloat16 does."""
    file, reference = written(tmp_path, every_matrix("Q4_K"))
    with make_llm(file, max_model_len=64, dtype="bfloat16", device=device) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False),
                                  strict=True):  # fmt: skip
            _, known = expected(reference, prompt)
            found = [entry[0].logprob for entry in output["prompt_logprobs"][1:]]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(known), rtol=0, atol=0.1)


def test_sizes_count_the_blocks(tmp_path: Path) -> None:
    """What `info` says: the bytes of the file's tensors."""
    file, _ = written(tmp_path, mixed, tie_word_embeddings=True)
    config = ModelConfig.from_dir(gguf_directory(file))
    found = model_bytes(config, WeightBytes(2, config.quantization))
    assert abs(found - file.stat().st_size) < 0.1 * file.stat().st_size


@pytest.mark.parametrize("types", [{"Q9_0": []}, {"Q4_0": "all"}, [], None])
def test_wrong_lists_of_types_are_refused(types: Any, tmp_path: Path) -> None:
    """A directory that someone edits."""
    file, _ = written(tmp_path, every_matrix("Q4_0"))
    directory = gguf_directory(file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["types"] = types
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises((TypeError, ValueError), match="types"):
        ModelConfig.from_dir(directory)


def test_random_weights_in_blocks_are_finite(tmp_path: Path) -> None:
    """`load_format="dummy"`, which needs the config alone."""
    for kind in BLOCK_TYPES:
        (tmp_path / kind).mkdir()
        file, _ = written(tmp_path / kind, every_matrix(kind), num_hidden_layers=1)
        with make_llm(file, max_model_len=64, load_format="dummy") as llm:
            output = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
            assert output.outputs[0].finish_reason == "length"
