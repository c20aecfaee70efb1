"""`apply_model` shows whole weights, also those that kernels have in layouts of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import MOE
from conftest import make_model
from reference import make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = dict(device="cpu", cpu_kvcache_gib=0.01, max_model_len=64)
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module", params=["cpu", "torch", "float16"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine with packed weights, with plain ones, or with plain ones as they were loaded."""
    more = {"attention_backend": request.param}
    if request.param == "float16":
        more = {"attention_backend": "torch", "dtype": "float16"}
    with LLM(EMBEDDED_MODEL, **more, **OPTIONS) as llm:
        yield llm


def sizes(model: Any) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def test_parameters_are_those_of_the_checkpoint(llm: LLM) -> None:
    """Their number, their shapes and their values."""
    (found,) = llm.apply_model(sizes)
    tensors = llm.get_weights()
    assert sum(found.values()) == sum(tensor.numel() for tensor in tensors.values())
    (state,) = llm.apply_model(lambda model: {**model.state_dict()})
    parts = [tensors[QKV.replace("qkv", kind)] for kind in "qkv"]
    assert torch.equal(state[QKV].cpu(), torch.cat(parts))
    (shape,) = llm.apply_model(lambda model: model.get_parameter(QKV).shape)
    assert shape == state[QKV].shape and "lm_head.weight" not in found, "it is tied"
    (head,) = llm.apply_model(lambda model: model.lm_head.weight)
    assert torch.equal(head, tensors["model.embed_tokens.weight"])


def test_the_model_is_as_before(llm: LLM) -> None:
    """The copies are gone, and nothing that the function did to them is lost in silence."""
    params = SamplingParams(temperature=0, max_tokens=4)

    def change(model: Any) -> None:
        model.get_parameter(QKV).data.zero_()

    def replace(model: Any) -> None:
        model.model.layers[0].self_attn.qkv_proj.weight = torch.nn.Parameter(torch.zeros(1))

    model = llm.model_runner.shard.model
    before = [name for name, _ in model.named_parameters()]
    is_packed = QKV not in before and llm.apply_model(lambda one: QKV in sizes(one)) == [True]
    assert [name for name, _ in model.named_parameters()] == before
    with pytest.raises(RuntimeError, match="a new weight would be lost"):
        llm.apply_model(replace)
    qkv = model.model.layers[0].self_attn.qkv_proj
    if qkv.matrix.operand is None or not isinstance(qkv.matrix.operand, torch.Tensor):
        with pytest.raises(ValueError, match=f"no step reads: {QKV}; use LLM"):
            llm.apply_model(change)
        (output,) = llm.generate("7+8=", params, use_tqdm=False)
        assert output.text == "15" and is_packed


def test_a_weight_is_one_object_and_new_data_is_an_error(llm: LLM) -> None:
    """So that `layer.weight.data = values` does something, or says why it does not."""

    def replace(model: Any) -> None:
        layer = model.get_submodule(QKV.rpartition(".")[0])
        assert layer.weight is layer.weight
        layer.weight.data = torch.zeros_like(layer.weight)

    before = llm.get_weights()[QKV.replace("qkv", "q")]
    with pytest.raises(ValueError, match=f"no step reads: {QKV}; use LLM"):
        llm.apply_model(replace)
    assert torch.equal(llm.get_weights()[QKV.replace("qkv", "q")], before)


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_from_weights_is_computed_again_after_an_error(llm: LLM, fails: bool) -> None:
    """The engine would otherwise compute with old and new values."""
    calls: list[str] = []

    def change(model: Any) -> None:
        model.norm_of_test = torch.nn.Identity()
        model.norm_of_test.refresh = lambda: calls.append("refresh")
        if fails:
            raise ValueError("no step reads")
        model.get_parameter(QKV).data = torch.zeros(1)

    with pytest.raises(ValueError, match="no step reads"):
        llm.apply_model(change)
    del llm.model_runner.shard.model.norm_of_test
    assert calls == ["refresh"]


def test_experts_are_shown(tmp_path: Path) -> None:
    path = make_model(tmp_path, **MOE)
    for backend in ("cpu", "torch"):
        with make_llm(path, attention_backend=backend) as llm:
            (found,) = llm.apply_model(sizes)
            assert sum(found.values()) == sum(one.numel() for one in llm.get_weights().values())


def test_quantized_weights_are_missed_by_name() -> None:
    with LLM(EMBEDDED_MODEL, quantization="int8", **OPTIONS) as llm:
        assert QKV not in llm.apply_model(sizes)[0]
        with pytest.raises(AttributeError, match="has its weight in a layout of the kernels alone"):
            llm.apply_model(lambda model: model.model.layers[0].self_attn.qkv_proj.weight)
