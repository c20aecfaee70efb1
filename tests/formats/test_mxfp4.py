"""MXFP4 as gpt-oss publishes it, against its definition and transformers' model of the values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import OPTIONS as WITH_ADAPTERS
from adapted import with_adapters
from conftest import edit_config
from families import SAMPLES
from families.describe import write
from families.gpt_oss import FILE, layers
from reference import Case, assert_same, check_logits, generate, make_case, make_llm, make_prompts
from safetensors.torch import load_file, save_file

from nanovllm.formats.in_turn import MxFormat
from nanovllm.formats.methods import read_quantization
from nanovllm.formats.mxfp4 import read_mxfp4
from nanovllm.formats.stored import RankPart
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.plain.dequantize_blocks import dequantize
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIG = FILE["quantization_config"]


def random_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [..., K / 32, 16] and scales [..., K / 32] of a stack [..., K]."""
    groups = (*shape[:-1], shape[-1] // 32)
    values = torch.randint(256, (*groups, 16), dtype=torch.uint8)
    return values, torch.randint(122, 127, groups, dtype=torch.uint8)


def values_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The definition: the low half of a byte first, times 2 to the power of the scale - 127."""
    pairs = torch.stack([E2M1[(blocks & 15).int()], E2M1[(blocks >> 4).int()]], dim=-1)
    return (pairs.flatten(-2) * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def loaded(part: RankPart, blocks: torch.Tensor, scales: torch.Tensor) -> Any:
    """The rank's weight of one matrix."""
    made = MxFormat(read_mxfp4(CONFIG).schemes[0])
    layer = torch.nn.Module()
    part = made.register(layer, part)
    for name, tensor in (("weight_blocks", blocks), ("weight_scales", scales)):
        param = getattr(layer, name)
        made.load(param, param, tensor, None, {})
    return made.weight(made.registered(layer), part)


def test_blocks_become_those_of_gguf_without_a_loss() -> None:
    """Rows of gate and up in turn, halves of bytes, and the smallest scales."""
    torch.manual_seed(0)
    blocks, scales = random_blocks(20, 96)
    scales[0, 0], scales[1, 0], scales[2, 0] = 0, 1, 254
    expected = values_of(blocks, scales)
    rows = slice(5, 10)  # of two ranks, the second
    both = loaded(RankPart((10, 10), (rows, rows), 96, slice(0, 96)), blocks, scales)
    assert isinstance(both, BlockMatrix)
    found = dequantize(both.codes, both.kind).flatten(1)
    assert torch.equal(found, torch.cat([expected[10:20:2], expected[11:20:2]]))
    inside = loaded(RankPart((20,), (slice(0, 20),), 96, slice(48, 96)), blocks, scales)
    assert torch.equal(inside, expected[:, 48:]), "a part that begins in a block is a plain weight"


def test_a_scale_that_is_no_number_is_refused() -> None:
    blocks, scales = random_blocks(2, 32)
    scales[1] = 255
    with pytest.raises(ValueError, match="a scale of MXFP4 is 255"):
        loaded(RankPart.whole(2, 32), blocks, scales)


def test_the_config_says_which_layers_are_plain() -> None:
    found = read_quantization({"quantization_config": CONFIG})
    assert found.scheme("model.layers.3.mlp.experts.5.up_proj") is not None
    for name in ("self_attn.q_proj", "mlp.router"):
        assert found.scheme(f"model.layers.3.{name}") is None
    assert found.scheme("lm_head") is None
    excluded = read_mxfp4({"modules_to_not_convert": ["model.layers.3.mlp"]})
    assert excluded.scheme("model.layers.3.mlp.experts.5.up_proj") is None
    assert excluded.scheme("model.layers.4.mlp.experts.5.up_proj") is not None
    for config in ({"dequantize": True}, {"modules_to_not_convert": "lm_head"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(config))):
            read_mxfp4(config)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in MXFP4, and the same values as plain weights."""
    sizes = dict(intermediate_size=64, num_hidden_layers=2)
    sample = replace(SAMPLES["gpt-oss"], fields=SAMPLES["gpt-oss"].fields | sizes)
    plain = write(tmp_path_factory.mktemp("plain"), sample)
    path = write(tmp_path_factory.mktemp("mxfp4"), sample)
    values = load_file(plain / "model.safetensors")
    stored = dict(values)
    for name, tensor in values.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = random_blocks(len(tensor), tensor.shape[2], tensor.shape[1])
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = values_of(blocks, scales).transpose(1, 2).contiguous()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=CONFIG)
    return path, plain


@pytest.fixture(scope="module")
def case(paths: tuple[Path, Path]) -> Case:
    """The model in MXFP4, and what transformers makes of its values."""
    return replace(make_case(paths[1], make_prompts()), path=paths[0])


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_model_equals_transformers(case: Case, backend: str) -> None:
    check_logits(case, attention_backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_two_ranks_equal_transformers(case: Case, whole: bool) -> None:
    options = dict(tensor_parallel_size=2, enable_expert_parallel=whole)
    with make_llm(case.path, **options) as llm:
        assert_same(generate(llm, case), case.expected)


@pytest.mark.sampled(share=0.35)
def test_adapters_of_experts_equal_peft(paths: tuple[Path, Path], tmp_path: Path) -> None:
    adapted = with_adapters(paths[1], tmp_path, 8, ["stacks"])
    with make_llm(paths[0], **WITH_ADAPTERS) as llm:
        assert_same(adapted.generate(llm), adapted.expected)


def test_random_weights_have_the_layout_of_the_files(case: Case) -> None:
    with make_llm(case.path, load_format="dummy") as llm:
        assert len(generate(llm, replace(case, prompts=case.prompts[:2]))) == 2


def test_blocks_are_updated_by_their_names(case: Case) -> None:
    weights = load_file(case.path / "model.safetensors")
    with make_llm(case.path, load_format="dummy") as llm:
        llm.update_weights(weights)
        assert_same(generate(llm, case), case.expected)


def test_stacks_that_were_not_turned_are_refused(tmp_path: Path) -> None:
    """[E, 2 * I, hidden], as other families have them."""
    path = write(tmp_path, SAMPLES["gpt-oss"])
    weights = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"gate_up_proj.* has shape \(5, 112, 64\)"):
        make_llm(path)


def test_experts_are_not_quantized_while_they_are_loaded(tmp_path: Path) -> None:
    file = {n: v for n, v in layers(2, 4).items() if n != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="experts with biases are supported in MXFP4"):
        make_llm(write(tmp_path / "model", SAMPLES["gpt-oss"]), quantization="int8")
    assert ModelConfig.from_dir(tmp_path).quantization is None
    with torch.device("meta"):
        build_model(ModelConfig.from_dir(tmp_path), 16)
