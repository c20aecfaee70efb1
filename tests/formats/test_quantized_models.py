"""Quantized checkpoints: every weight of every format, and what engines generate with them.

It costs more than 20 seconds: each of many formats is written, read and divided.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_kernels import changed
from conftest import edit_config, make_model
from quantization_variants import MOE, ODD, VARIANTS, fp8_config, fp8_kind, uniform
from quantized_checkpoints import DEQUANTIZED, WEIGHTS, Variant, encode, write_quantized
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.start.load import choose_formats
from nanovllm.formats import layouts
from nanovllm.formats.choice import QuantizedFormats
from nanovllm.formats.names import USUAL_NAMES
from nanovllm.formats.scheme import ONLINE
from nanovllm.formats.stored import RankPart
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain.quantized_linear import dense_matrix, dequantize
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.linear import few_rows
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.dummy import load_dummy
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

INPUT_SCALES = ("input_scale", "activation_scale")
FUSED: dict[str, Any] = dict(family="Phi3")  # its projections are fused in the checkpoint too
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {}, "odd sizes": ODD, "experts": MOE, "fused": FUSED, "fused, odd sizes": ODD | FUSED,
}  # fmt: skip


def load(path: Path, ranks: Ranks = ALONE, whole_experts: bool = False) -> CausalLM:
    """A rank's model, not bound yet."""
    config = ModelConfig.from_dir(path)
    formats = choose_formats(Config(str(path)), config, path)
    model = build_model(config, 64, ranks, whole_experts, formats)
    load_model(model, path)
    return model


def dense(weight: Any, size_in: int) -> torch.Tensor:
    if isinstance(weight, list):
        return torch.cat([dense(part, size_in).float() for part in weight])
    return weight if isinstance(weight, torch.Tensor) else dense_matrix(weight, size_in)


def matrices(model: CausalLM) -> Iterator[tuple[str, Any, RankPart]]:
    """The weights of a model by our names, of experts by their numbers."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            weight = layer.weight_format.weight(layer.stored_tensors(), layer.rank_part)
            yield name, weight, layer.rank_part
        elif isinstance(layer, Experts):
            for matrix, held in layer.rank_parts.items():
                stacks = layer.stored_tensors(matrix)
                for i in range(layer.num_own):
                    own = {leaf: stack[i] for leaf, stack in stacks.items()}
                    yield f"{name}.{i}.{matrix}", layer.formats[matrix].weight(own, held), held


def weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """The plain matrices of a model."""
    return {name: dense(weight, held.num_columns) for name, weight, held in matrices(model)}


@pytest.mark.sampled
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


def rounds_inputs(config: dict[str, Any], bits: int) -> bool:
    """Whether a config allows that the inputs of matrices with codes of `bits` are rounded."""
    groups = config.get("config_groups", {}).values()
    of_bits = [group for group in groups if group["weights"]["num_bits"] == bits]
    return config["quant_method"] == "fp8" or any(group["input_activations"] for group in of_bits)


@pytest.mark.sampled(share=0.4)
@pytest.mark.parametrize("name", VARIANTS)
def test_inputs_are_rounded_where_the_config_says_it(name: str, tmp_path: Path) -> None:
    """With the largest static scale of a fused layer's projections."""
    path = write_quantized(tmp_path / "model", VARIANTS[name], **MOE)
    stored = load_file(path / WEIGHTS)
    first_is_largest = []
    for module, weight, _ in matrices(load(path)):
        above, _, leaf = module.rpartition(".")
        parts = USUAL_NAMES.parts(leaf) or [leaf]
        for each in weight if isinstance(weight, list) else [weight]:
            if not isinstance(each, QuantizedMatrix):
                continue
            assert each.rounds_inputs == rounds_inputs(VARIANTS[name].config, each.bits)
            names = [f"{above}.{part}.{end}" for part in parts for end in INPUT_SCALES]
            scales = [float(stored[name]) for name in names if name in stored]
            found = each.input_scale
            assert (found if found is None else float(found)) == max(scales, default=None)
            if scales:
                first_is_largest.append(scales[0] == max(scales))
    assert first_is_largest == [] or not all(first_is_largest)


@pytest.mark.parametrize("online", ONLINE)
def test_inputs_are_rounded_for_weights_quantized_to_fp8(online: str, tmp_path: Path) -> None:
    """Not for the other types, nor those of routers and heads."""
    path = make_model(tmp_path / "model", **MOE)
    config = ModelConfig.from_dir(path, online)
    model = build_model(config, 64, formats=QuantizedFormats(quantization=config.quantization))
    load_model(model, path)
    found = [
        each.rounds_inputs for _, each, _ in matrices(model) if isinstance(each, QuantizedMatrix)
    ]
    assert found == [online == "fp8"] * len(found) and len(found) > 16


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "size"), [("Qwen3", 4), ("experts", 2), ("fused", 2)])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_hold_parts_of_the_same_weights(
    name: str, model: str, size: int, tmp_path: Path
) -> None:
    """Parts that begin and end within the blocks and groups of a format. Experts are whole."""
    heads = dict(num_attention_heads=8, num_key_value_heads=2)
    path = write_quantized(tmp_path / "model", VARIANTS[name], **MODELS[model] | heads)
    for rank in range(size):
        ranks, whole_experts = Ranks(rank, size), model == "experts"
        found = weights(load(path, ranks, whole_experts))
        expected = weights(load(path / DEQUANTIZED, ranks, whole_experts))
        assert found.keys() == expected.keys()
        for name in found:
            assert torch.equal(found[name].float(), expected[name]), name


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("size", [1, 2])
def test_stacks_of_experts_may_share_blocks_between_projections(size: int, tmp_path: Path) -> None:
    """Blocks of 24 rows, of gate and up with 32 each: the second block belongs to both."""
    config = fp8_config([24, 32], modules_to_not_convert=["lm_head", "gate"])
    variant = uniform(config, fp8_kind(24, 32))
    path = write_quantized(tmp_path / "model", variant, **MOE)
    exact = load_file(path / DEQUANTIZED / WEIGHTS)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
            matrices = []
            for i in range(8):
                parts = [f"{layer}.{i}.{part}_proj" for part in ("gate", "up")]
                fused = torch.cat([exact[f"{part}.weight"] for part in parts])
                matrices.append(encode(fused, fp8_kind(24, 32)))
                for part, values in zip(parts, matrices[-1].exact.chunk(2), strict=True):
                    exact[f"{part}.weight"] = values.contiguous()
                    del tensors[f"{part}.weight"], tensors[f"{part}.weight_scale_inv"]
            stored = [fp8_kind(24, 32).store(codes) for codes in matrices]
            for end, name in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
                whole = torch.stack([each[name].view(torch.uint8) for each in stored])
                tensors[f"{layer}.gate_up_proj{end}"] = whole.view(stored[0][name].dtype)
                down = [f"{layer}.{i}.down_proj.{name}" for i in range(8)]
                whole = torch.stack([tensors.pop(each).view(torch.uint8) for each in down])
                tensors[f"{layer}.down_proj{end}"] = whole.view(stored[0][name].dtype)

    rewrite(path, stack)
    rewrite(path / DEQUANTIZED, lambda tensors: tensors.update(exact))
    for rank in range(size):
        found = weights(load(path, Ranks(rank, size)))
        expected = weights(load(path / DEQUANTIZED, Ranks(rank, size)))
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_scales_must_be_of_the_blocks_of_the_codes(tmp_path: Path) -> None:
    """Codes of a fused matrix, and scales as if its projections had blocks of their own."""
    path = write_quantized(tmp_path / "model", VARIANTS["fp8, small blocks"], **FUSED)

    def divide(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.gate_up_proj.weight_scale_inv"]
        for part in ("gate", "up"):
            scales = torch.ones(2, 2, dtype=torch.bfloat16)
            tensors[f"model.layers.1.mlp.{part}_proj.weight_scale_inv"] = scales

    rewrite(path, divide)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    with pytest.raises(ValueError, match=rf"'{name}' has blocks of 64 rows.* \(96, 96\) rows"):
        load(path)


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
    found = experts_out(load(path), changed(PLAIN, experts=experts, reads_stacks=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert seen == [torch.Tensor if "order" in name else QuantizedMatrix]


@pytest.mark.parametrize("name", ["fp8, blocks of 128", "fp8, static"])
def test_norms_and_activations_round_rows_for_the_layers_after_them(
    name: str, tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the attention's output is rounded by a kernel of its own. No logit changes by that."""
    from nanovllm.kernels.triton.linear.quantize_rows import RoundedRows, RoundingKernels

    alone = 0

    def count(self: RoundingKernels, x: torch.Tensor) -> RoundedRows:
        nonlocal alone
        alone += 1
        return rows(self, x)

    rows = RoundingKernels.rows
    monkeypatch.setattr(RoundingKernels, "rows", count)
    path = str(write_quantized(tmp_path / "model", VARIANTS[name]))
    options: dict[str, Any] = dict(
        device=kernel_device, dtype="float32", attention_backend="triton", num_kvcache_blocks=64,
        enforce_eager=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, logprobs=3, temperature=0)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(layouts.KernelMatrix, "rounding", lambda *_: None)
        with LLM(path, **options) as llm:
            alone = 0
            (output,) = llm.generate([{"prompt_token_ids": list(range(70))}], params, False)
        found.append((alone, output.outputs[0]["logprobs"]))
    # The last layer computes keys and values for all rows, and the rest for one.
    assert [number for number, _ in found] == [1, 5]
    assert found[0][1] == found[1][1]


def without(name: str, module: str) -> Variant:
    """A variant that leaves the modules alone whose names have a match of `module`."""
    variant = VARIANTS[name]
    config = variant.config | {"dynamic": {f"-:.*{module}": {}}}
    if "ignore" in variant.config:
        config = variant.config | {"ignore": [*variant.config["ignore"], f"re:.*{module}"]}
    return replace(variant, config=config, kinds=((module, None), *variant.kinds))


@pytest.mark.parametrize(
    ("variant", "most_rows"),
    [
        (VARIANTS["ct, 4 bits"], 64),
        (without("ct, 4 bits", r"layers\.0\."), 64),
        (without("ct, 4 bits", r"layers\.1\."), 64),
        (without("ct, 4 bits", r"layers\.[01]\."), 256),
        (without("ct, 4 bits", r"layers\.1\.self_attn\.k_proj"), None),
        (without("gptq, act-order", r"layers\.0\."), None),
    ],
    ids=["all", "not layer 0", "not layer 1", "none", "not a part of layer 1", "order"],
)
def test_few_rows_are_computed_as_every_layer_allows(
    variant: Variant, most_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: the least number of rows of any layer, and none if a layer has no kernel."""
    monkeypatch.setattr(few_rows, "can_copy_tiles", lambda _: True)
    monkeypatch.setattr(few_rows, "num_multiprocessors", lambda _: 4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load(write_quantized(tmp_path / "model", variant))
    finally:
        torch.set_default_dtype(torch.float32)
    model.bind(Backend(TorchBackend(), triton_kernels()), few_rows=True)
    found = model.model.few_rows
    assert (found and found.most_rows) == most_rows


# Random weights


@pytest.fixture(scope="module", params=["Qwen3", "experts", "fused"])
def model_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config.json of a plain model."""
    path = make_model(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    return (path / "config.json").read_text()


@pytest.mark.sampled
@pytest.mark.parametrize("name", VARIANTS)
def test_random_weights_need_only_the_config(name: str, model_config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(model_config)
    edit_config(tmp_path, quantization_config=VARIANTS[name].config)
    options: dict[str, Any] = dict(device="cpu", dtype="float32", num_kvcache_blocks=1)
    with LLM(tmp_path, load_format="dummy", **options) as llm:
        (out,) = llm.generate([[5]], SamplingParams(max_tokens=4, logprobs=0), use_tqdm=False)
    assert all(math.isfinite(step[0]["logprob"]) for step in out["logprobs"])


@pytest.mark.sampled
@pytest.mark.parametrize("name", VARIANTS)
def test_random_weights_are_as_large_as_plain_ones(
    name: str, model_config: str, tmp_path: Path
) -> None:
    """A deviation of 0.02, or more where zero points are random too; no two matrices are alike."""
    (tmp_path / "config.json").write_text(model_config)
    edit_config(tmp_path, quantization_config=VARIANTS[name].config)
    config = ModelConfig.from_dir(tmp_path)
    formats = choose_formats(Config(str(tmp_path), load_format="dummy"), config, tmp_path)
    model = build_model(config, 64, formats=formats)
    load_dummy(model, model, 0)
    found = weights(model)
    wrong = {name: float(w.std()) for name, w in found.items() if not 0.016 < w.std() < 0.035}
    assert wrong == {}
    assert len({tuple(weight[:4, :4].flatten().tolist()) for weight in found.values()}) == len(
        found
    )
