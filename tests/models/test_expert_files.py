"""The names of experts' tensors: those of published files, and those of transformers' modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.describe import write
from families.experts import SAMPLES
from quantization_variants import FP8_CHANNEL, FP8_SCHEME, W4_ARGS, W4_GROUP, awq, ct_config, group
from quantized_checkpoints import DEQUANTIZED, Kind, Variant, write_quantized
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nanovllm.config import Config
from nanovllm.engine.start.load import choose_formats
from nanovllm.formats.mixed import dense
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(path: Path) -> CausalLM:
    config = ModelConfig.from_dir(path)
    model = build_model(config, 16, formats=choose_formats(Config(str(path)), config, path))
    load_model(model, path)
    return model


@pytest.mark.parametrize("name", ["Mixtral", "GraniteMoE", "Phi-3.5-MoE", "Qwen2-MoE", "OLMoE"])
def test_files_may_have_the_names_of_transformers_modules(name: str, tmp_path: Path) -> None:
    """Tools that save a state dict do not translate names back; experts are then stacked."""
    path = write(tmp_path, SAMPLES[name])
    expected = loaded(path)
    tensors = AutoModelForCausalLM.from_pretrained(path).state_dict()
    (path / "model.safetensors").unlink()
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors")
    for one, other in zip(expected.parameters(), loaded(path).parameters(), strict=True):
        assert torch.equal(one, other)


PLAIN = r"lm_head|embed_tokens|gate$"
LISTED = ["lm_head", "re:.*block_sparse_moe.gate$", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]


def quantized(config: dict[str, Any], kind: Kind | None) -> Variant:
    """All linear layers are quantized, except the head, routers and gates of shared experts."""
    return Variant(config, ((PLAIN, None), (r"_proj$|\.w[123]$", kind)))


VARIANTS = {
    "ct, 4 bits": quantized(ct_config("pack-quantized", group(W4_ARGS), ignore=LISTED), W4_GROUP),
    "ct, fp8": quantized(
        ct_config("float-quantized", group(*FP8_SCHEME), ignore=LISTED), FP8_CHANNEL
    ),
    "awq": quantized(awq(32).config, awq(32).kind_of("q_proj")),
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(family="Mixtral", num_local_experts=3),
    "Qwen2-MoE": dict(
        family="Qwen2Moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
}  # fmt: skip


def dense_weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """The matrices of all layers and experts, as plain PyTorch multiplies by them."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Experts):
            for matrix in layer.formats:
                for i, weight in enumerate(layer._weights(matrix)):
                    size = layer.rank_parts[matrix].num_columns
                    found[f"{name}.{i}.{matrix}"] = dense(weight, size, torch.float32)
        elif isinstance(layer, LinearBase):
            part = layer.rank_part
            weight = layer.weight_format.weight(layer.stored_tensors(), part)
            found[name] = dense(weight, part.num_columns, torch.float32)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_rules_of_quantized_files_name_experts_as_the_files_do(
    name: str, model: str, tmp_path: Path
) -> None:
    """By our names, a rule would quantize the router, or leave out the experts."""
    path = write_quantized(tmp_path / "model", VARIANTS[name], **MODELS[model])
    config = ModelConfig.from_dir(path)
    assert config.quantization is not None
    assert config.quantization.scheme("model.layers.0.mlp.gate") is None or name == "awq"
    found, expected = dense_weights(loaded(path)), dense_weights(loaded(path / DEQUANTIZED))
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("name", ["Mixtral", "GraniteMoE", "Phi-3.5-MoE", "Qwen2-MoE"])
def test_weights_are_quantized_while_loading_except_routers(name: str, tmp_path: Path) -> None:
    """Routers and gates have other names in the files of each family."""
    path = write(tmp_path, SAMPLES[name])
    config = ModelConfig.from_dir(path, "int8")
    assert config.quantization is not None
    scheme, above = config.quantization.scheme, "model.layers.0.mlp"
    assert scheme(f"{above}.gate") is None and scheme(f"{above}.shared_expert_gate") is None
    for part in (above, f"{above}.experts.0", f"{above}.shared_expert"):
        assert scheme(f"{part}.gate_proj") is not None
