"""Adapters that are not right, or not supported: each is an error that names file and reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import MOE, make_adapter, write_adapter
from conftest import make_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm.adapters.peft import read_adapter
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import InFile, load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
SHAPES = {Q: (64, 64), DOWN: (64, 96), HEAD: (259, 64)}
WEIGHTS = "adapter_model.safetensors"
FIRST = torch.tensor([0])
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = make_model(tmp_path_factory.mktemp("model"))
    with torch.inference_mode():
        model = build_model(ModelConfig.from_dir(path), 64)
        load_model(model, path)
    return model


def key(module: str, end: str) -> str:
    return f"base_model.model.{module}.{end}"


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": (dict(peft_type="IA3"), "peft_type must be 'LORA', got 'IA3'"),
    "DoRA": (dict(use_dora=True), r"use_dora=True \(DoRA\) is not supported"),
    "biases": (dict(bias="all"), "bias must be 'none', got 'all'"),
    "biases of B": (dict(lora_bias=True), "lora_bias=True is not supported"),
    "whole modules": (dict(modules_to_save=["lm_head"]), "modules_to_save=.*is not supported"),
    "a parameter": (dict(target_parameters=["q_proj.weight"]), "must be .*, got 'q_proj.weight'"),
    "megatron": (dict(megatron_config={"a": 1}), "megatron_config=.*is not supported"),
    "tokens": (dict(trainable_token_indices=[1]), "trainable_token_indices=.*is not supported"),
    "repeated layers": (dict(layer_replication=[[0, 1]]), "layer_replication=.*is not supported"),
    "a field of the future": (dict(use_magic=True), "use_magic=True is not supported"),
    "changed base weights": (dict(init_lora_weights="pissa"), "changes the model's own weights"),
    "no rank": (dict(r="4"), "r must be an int >= 1, got '4'"),
    "rank 0": (dict(r=0), "r must be >= 1, got 0"),
    "an infinite scale": (dict(lora_alpha=float("inf")), "lora_alpha must be finite"),
    "a bad pattern": (dict(rank_pattern={"(": 3}), "rank_pattern must have regular expressions"),
    "a bad rank": (dict(rank_pattern={"q_proj": -1}), r"rank_pattern\['q_proj'\] must be >= 1"),
    "no list": (dict(target_modules=3), "target_modules must be a string or a list of strings"),
    "not targeted": (
        dict(target_modules=["q_proj", "lm_head"]), rf"'{DOWN}' .* target_modules does not list it"
    ),
    "excluded": (dict(exclude_modules=["down_proj"]), f"'{DOWN}' .* exclude_modules lists it"),
    "another layer": (
        dict(target_modules=["q_proj", "down_proj", "lm_head"], layers_to_transform=[0]),
        f"'{HEAD}' .* layers_to_transform does not list its layer",
    ),
    "another rank": (
        dict(rank_pattern={"down_proj": 5}), r"down_proj.lora_A' has shape \(3, 96\).*rank 5 need"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_config_that_is_not_supported_is_a_named_error(
    name: str, model: CausalLM, tmp_path: Path
) -> None:
    fields, message = FIELDS[name]
    path = write_adapter(tmp_path / "adapter", SHAPES, **fields)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        read_adapter(path, model, 8)
    assert str(path) in str(error.value)


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def plus(tensors: Tensors, name: str, *shape: int) -> Tensors:
    return tensors | {name: torch.zeros(shape)}


TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no A": (lambda t: without(t, key(Q, "lora_A.weight")), f"lacks {Q}.lora_A"),
    "no B": (lambda t: without(t, key(Q, "lora_B.weight")), f"lacks {Q}.lora_B"),
    "a long A": (
        lambda t: plus(t, key(Q, "lora_A.weight"), 3, 65), rf"'{Q}.lora_A' has shape \(3, 65\)"
    ),
    "a short B": (
        lambda t: plus(t, key(Q, "lora_B.weight"), 63, 3), rf"'{Q}.lora_B' has shape \(63, 3\)"
    ),
    "a scalar": (lambda t: plus(t, key(Q, "lora_B.weight")), rf"'{Q}.lora_B' has shape \(\)"),
    "integers": (
        lambda t: t | {key(Q, "lora_A.weight"): torch.ones(3, 64, dtype=torch.int32)},
        f"'{Q}.lora_A' has type I32",
    ),
    "a NaN": (
        lambda t: t | {key(Q, "lora_A.weight"): torch.ones(3, 64).index_fill(1, FIRST, torch.inf)},
        f"'{Q}.lora_A' has values that are not finite",
    ),
    "another layer": (
        lambda t: plus(t, key("model.layers.2.mlp.up_proj", "lora_A.weight"), 3, 64),
        "module 'model.layers.2.mlp.up_proj' does not exist",
    ),
    "a misspelled module": (
        lambda t: plus(t, key("model.layers.1.mlp.upp_proj", "lora_A.weight"), 3, 64),
        "did you mean 'model.layers.1.mlp.up_proj'",
    ),
    "a norm": (
        lambda t: plus(t, key("model.norm", "lora_A.weight"), 3, 64), "'model.norm' does not exist"
    ),
    "a magnitude": (
        lambda t: plus(t, key(Q, "lora_magnitude_vector"), 64), "is of DoRA, which is not"
    ),
    "a bias of B": (lambda t: plus(t, key(Q, "lora_B.bias"), 64), "is of lora_bias"),
    "a bias": (lambda t: plus(t, key(Q, "bias"), 64), "is of bias"),
    "a whole weight": (lambda t: plus(t, key(Q, "weight"), 64, 64), "unexpected tensor"),
    "nonsense": (lambda t: plus(t, "nonsense", 1), "unexpected tensor 'nonsense'"),
    "as an embedding": (
        lambda t: plus(t, key(Q, "lora_embedding_A"), 3, 64), "of another kind: lora_embedding_A"
    ),
    "nothing": (lambda t: {}, "has no tensors of adapters"),
    "fused and in parts": (
        lambda t: plus(
            plus(t, key("model.layers.0.self_attn.qkv_proj", "lora_A.weight"), 3, 64),
            key("model.layers.0.self_attn.qkv_proj", "lora_B.weight"), 128, 3,
        ),
        "are the same matrix",
    ),
    "another head": (
        lambda t: plus(t, key(HEAD, "base_layer.weight"), 259, 64), "has other values than the mod"
    ),
    "a larger vocabulary": (
        lambda t: plus(t, key(HEAD, "base_layer.weight"), 260, 64), "cannot resize the vocabulary"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_named_errors(name: str, model: CausalLM, tmp_path: Path) -> None:
    change, message = TENSORS[name]
    path = write_adapter(tmp_path / "adapter", SHAPES)
    save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS)
    with pytest.raises(ValueError, match=message) as error:
        read_adapter(path, model, 8)
    assert str(path / WEIGHTS) in str(error.value)


def test_a_rank_above_the_limit_is_refused(model: CausalLM, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", SHAPES, rank=9)
    with pytest.raises(ValueError, match=f"{HEAD} has rank 9: max_lora_rank must be >= 9, got 8"):
        read_adapter(path, model, 8)


def test_files_that_are_missing_or_damaged_are_named(model: CausalLM, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", SHAPES)
    weights, config = path / WEIGHTS, path / "adapter_config.json"
    data = weights.read_bytes()
    for length in (len(data) - 1, len(data) // 2, 100, 8, 7, 0):
        weights.write_bytes(data[:length])
        with pytest.raises(OSError, match="is truncated or damaged") as error:
            read_adapter(path, model, 8)
        assert str(weights) in str(error.value)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors does not exist"):
        read_adapter(path, model, 8)
    (path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="safe_serialization=True"):
        read_adapter(path, model, 8)
    config.write_text("{")
    with pytest.raises(OSError, match="is not valid JSON"):
        read_adapter(path, model, 8)
    config.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist; its directory"):
        read_adapter(path, model, 8)
    for other in (tmp_path / "nowhere", weights.parent / "adapter_model.bin"):
        with pytest.raises(NotADirectoryError, match="lora_path must be a local directory, got"):
            read_adapter(other, model, 8)


def test_an_adapter_has_the_scale_in_b(model: CausalLM, tmp_path: Path) -> None:
    fields: dict[str, Any] = dict(lora_alpha=5, alpha_pattern={"down_proj": 7})
    path = write_adapter(tmp_path / "adapter", SHAPES, **fields)
    tensors = load_file(path / WEIGHTS)
    adapter = read_adapter(path, model, 8)
    assert adapter.keys() == SHAPES.keys()
    for module, alpha in ((Q, 5), (DOWN, 7)):
        pair = adapter[module]
        assert pair.rank == 3
        assert torch.equal(pair.a, tensors[key(module, "lora_A.weight")])
        torch.testing.assert_close(pair.b.T, tensors[key(module, "lora_B.weight")] * (alpha / 3))


@pytest.mark.parametrize("binds", [True, False], ids=["by values", "by products"])
def test_the_base_weights_that_peft_saves_are_compared_in_parts(
    binds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves embedding and head beside their adapters, unless it is told not to."""
    path = make_model(tmp_path / "model")
    with torch.inference_mode():
        model = build_model(ModelConfig.from_dir(path), 64)
        load_model(model, path)
        if binds:
            model.lm_head.bind(Backend(TorchBackend(), PLAIN))
    adapter = make_adapter(path, tmp_path / "a", target_modules=["embed_tokens", "lm_head"])
    tensors = load_file(adapter / WEIGHTS)
    bases = {name: tensor for name, tensor in tensors.items() if "base_layer" in name}
    assert len(bases) == 2
    sizes: list[int] = []

    def read(tensor: InFile, index: Any) -> torch.Tensor:
        values = getitem(tensor, index)
        sizes.append(len(values))
        return values

    getitem = InFile.__getitem__
    monkeypatch.setattr(InFile, "__getitem__", read)
    monkeypatch.setattr("nanovllm.adapters.base_weights.NUM_ROWS", 100, raising=False)
    assert {*read_adapter(adapter, model, 8)} == {"model.embed_tokens", "lm_head"}
    assert sizes.count(100) == 4 and sizes.count(59) == 2
    assert sizes.count(259) == 1, "of B of the head"
    for name, base in bases.items():
        for row in (0, 258):
            other = base.clone()
            other[row] += 9
            save_file(tensors | {name: other}, adapter / WEIGHTS)
            with pytest.raises(ValueError, match="has other values than the model's"):
                read_adapter(adapter, model, 8)


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts"), **MOE)


@pytest.fixture(scope="module")
def moe(moe_path: Path) -> CausalLM:
    with torch.inference_mode():
        model = build_model(ModelConfig.from_dir(moe_path), 64)
        load_model(model, moe_path)
    return model


EXPERTS = "model.layers.1.mlp.experts"
GATE_UP = f"{EXPERTS}.base_layer"  # peft's name of it, beside one of down_proj


def test_all_experts_of_a_layer_are_one_pair(moe: CausalLM, moe_path: Path, tmp_path: Path) -> None:
    """Their product is the change of weights that peft computes."""
    options: dict[str, Any] = dict(
        rank_pattern={"down_proj": 3}, alpha_pattern={"down_proj": 5}, use_rslora=True
    )
    adapter = make_adapter(moe_path, tmp_path / "a", **options)
    read = read_adapter(adapter, moe, 8)
    assert {name for name in read if "mlp" in name} == {
        f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    }  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32)
    down = PeftModel.from_pretrained(base, adapter).base_model.model.model.layers[1].mlp.experts
    for name, wrapper, rank in (("down_proj", down, 3), ("gate_up_proj", down.base_layer, 8)):
        pair = read[f"{EXPERTS}.{name}"]
        assert wrapper.parameter_name == name
        assert pair.rank == rank
        torch.testing.assert_close(
            (pair.a.mT @ pair.b).mT, wrapper.get_delta_weight("default").detach()
        )


def test_a_router_may_have_an_adapter(moe: CausalLM, moe_path: Path, tmp_path: Path) -> None:
    """peft adds it for "all-linear"."""
    adapter = make_adapter(moe_path, tmp_path / "a", target_modules="all-linear")
    pair = read_adapter(adapter, moe, 8)["model.layers.1.mlp.gate"]
    assert (pair.a.shape, pair.b.shape) == ((4, 64), (4, 5))
    file = adapter / "adapter_config.json"
    listed = json.loads(file.read_text()) | {"target_parameters": ["gate_up_proj", "down_proj"]}
    file.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.gate' has an adapter, but"):
        read_adapter(adapter, moe, 8)


STACKS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "too few experts": (
        lambda t: plus(t, key(GATE_UP, "lora_A.weight"), 32, 64),
        rf"'{EXPERTS}.gate_up_proj.lora_A' has shape \(32, 64\).* need \(40, 64\)",
    ),
    "another rank": (
        lambda t: plus(t, key(EXPERTS, "lora_B.weight"), 64, 25),
        rf"'{EXPERTS}.down_proj.lora_B' has shape \(64, 25\).* need \(64, 20\)",
    ),
    "no B": (
        lambda t: without(t, key(EXPERTS, "lora_B.weight")), f"lacks {EXPERTS}.down_proj.lora_B"
    ),
    "one expert again": (
        lambda t: plus(
            plus(t, key(f"{EXPERTS}.3.up_proj", "lora_A.weight"), 4, 64),
            key(f"{EXPERTS}.3.up_proj", "lora_B.weight"), 24, 4,
        ),
        f"'{EXPERTS}.3.up_proj' and '{EXPERTS}.gate_up_proj' are the same matrix",
    ),
    "under another name": (
        lambda t: plus(t, key(f"{EXPERTS}.down_proj", "lora_A.weight"), 20, 24),
        f"module '{EXPERTS}.down_proj' does not exist, or can have no adapter",
    ),
    "wrapped once more": (
        lambda t: plus(t, key(f"{GATE_UP}.base_layer", "lora_A.weight"), 20, 64),
        f"module '{GATE_UP}.base_layer' does not exist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_wrong_tensors_of_all_experts_are_named_errors(
    name: str, moe: CausalLM, moe_path: Path, tmp_path: Path
) -> None:
    change, message = STACKS[name]
    path = make_adapter(moe_path, tmp_path / "adapter")
    save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        read_adapter(path, moe, 8)
