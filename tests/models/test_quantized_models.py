"""Quantized checkpoints: every weight of every format, and what engines generate with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_variants import MOE, ODD, VARIANTS
from quantized_checkpoints import DEQUANTIZED, write_quantized

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.startup import choose_formats
from nanovllm.kernels.plain.quantized_linear import dense_matrix, dequantize
from nanovllm.kernels.quantized import QuantizedMatrix
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.backend import Backend
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.weights.matrix import ArrangedMatrix
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, dict[str, Any]] = {"Qwen3": {}, "odd sizes": ODD, "experts": MOE}


def load(path: Path, ranks: Ranks = ALONE, whole_experts: bool = False) -> CausalLM:
    """A rank's model, not bound yet."""
    config = ModelConfig.from_dir(path)
    formats = choose_formats(Config(str(path)), config, path)
    model = CausalLM(config, 64, ranks, whole_experts, formats)
    load_model(model, path)
    return model


def dense(weight: Any, size_in: int) -> torch.Tensor:
    if isinstance(weight, list):
        return torch.cat([dense(part, size_in).float() for part in weight])
    return weight if isinstance(weight, torch.Tensor) else dense_matrix(weight, size_in)


def weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """The plain matrices of a model by our names, of experts by their numbers."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            weight = layer.weight_format.weight(layer.stored_tensors(), layer.held)
            found[f"{name}.weight"] = dense(weight, layer.held.num_columns)
        elif isinstance(layer, Experts):
            for matrix, held in layer.held.items():
                stacks = layer.stored_tensors(matrix)
                for i in range(layer.num_held):
                    own = {leaf: stack[i] for leaf, stack in stacks.items()}
                    weight = layer.formats[matrix].weight(own, held)
                    found[f"{name}.{i}.{matrix}"] = dense(weight, held.num_columns)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_that_the_checkpoint_stands_for(
    name: str, model: str, tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name], shards=True, **MODELS[model])
    found = weights(load(path))
    expected = weights(load(path / DEQUANTIZED))
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.equal(found[name].float(), expected[name])]
    assert wrong == []


@pytest.mark.parametrize(("size", "whole_experts"), [(4, False), (2, True)])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_hold_parts_of_the_same_weights(
    name: str, size: int, whole_experts: bool, tmp_path: Path
) -> None:
    """Parts that begin and end within the blocks and groups of a format."""
    model = dict(num_attention_heads=8, num_key_value_heads=2)
    path = write_quantized(
        tmp_path / "model", VARIANTS[name], **(MOE if whole_experts else {}) | model
    )
    for rank in range(size):
        ranks = Ranks(rank, size)
        found = weights(load(path, ranks, whole_experts))
        expected = weights(load(path / DEQUANTIZED, ranks, whole_experts))
        assert found.keys() == expected.keys()
        for name in found:
            assert torch.equal(found[name].float(), expected[name]), name


def experts_out(model: CausalLM, kernels: Kernels) -> torch.Tensor:
    """What the first layer's experts make of some rows."""
    torch.manual_seed(0)
    layer = next(module for module in model.modules() if isinstance(module, Experts))
    layer.bind(Backend(TorchBackend(), kernels))
    shares, ids = torch.rand(9, layer.num_experts).topk(2)
    return layer(torch.randn(9, 64), ids, shares)


@pytest.mark.parametrize("name", ["ct, 4 bits", "gptq, act-order"])
def test_kernels_may_take_experts_as_stacks(name: str, tmp_path: Path) -> None:
    """Also those of which each assigns its columns to groups in its own way."""
    path = write_quantized(tmp_path / "model", VARIANTS[name], **MOE)
    seen: list[Any] = []

    def experts(x: torch.Tensor, gate_up: Any, down: Any, *rest: Any) -> torch.Tensor:
        seen.append(type(gate_up))
        dense = (w if isinstance(w, torch.Tensor) else dequantize(w) for w in (gate_up, down))
        return PLAIN.experts(x, *dense, *rest)

    expected = experts_out(load(path / DEQUANTIZED), PLAIN)
    found = experts_out(load(path), replace(PLAIN, experts=experts))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert seen == [torch.Tensor if "order" in name else QuantizedMatrix]


@pytest.mark.parametrize("name", ["fp8, blocks of 128", "fp8, static"])
def test_norms_and_activations_round_rows_for_the_layers_after_them(
    name: str, tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the attention's output is rounded by a kernel of its own. No logit changes by that."""
    from nanovllm.kernels.triton.quantize_rows import RoundedRows, Rounding

    alone = 0

    def count(self: Rounding, x: torch.Tensor) -> RoundedRows:
        nonlocal alone
        alone += 1
        return rows(self, x)

    rows = Rounding.rows
    monkeypatch.setattr(Rounding, "rows", count)
    path = str(write_quantized(tmp_path / "model", VARIANTS[name]))
    options: dict[str, Any] = dict(
        device=kernel_device, dtype="float32", attention_backend="triton", num_kvcache_blocks=64,
        enforce_eager=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, logprobs=3, temperature=0)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(ArrangedMatrix, "rounding", lambda *_: None)
        with LLM(path, **options) as llm:
            alone = 0
            (output,) = llm.generate([{"prompt_token_ids": list(range(70))}], params, False)
        found.append((alone, output.outputs[0].logprobs))
    # The last layer computes keys and values for all rows, and the rest for one.
    assert [number for number, _ in found] == [1, 5]
    assert found[0][1] == found[1][1]
