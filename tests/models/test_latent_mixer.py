"""Models with latent attention: what comparing with transformers does not show."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config
from families import PUBLISHED, SAMPLES
from families.describe import write
from quantization_variants import fp8_config, fp8_kind
from quantized_checkpoints import DEQUANTIZED, Variant, dequantized, quantize
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.start.load import choose_formats
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.routing import ExpertGroups
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import ADAPTERS, reading
from nanovllm.layers.latent_expansion import LatentExpansion
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.lora import group_rows
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.latents import SparseLatentConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = LatentSizes(
    num_heads=6, query_rank=None, rank=20, plain=12, rotated=8, value=10, has_bias=False,
    interleaved=True, scale=1.0,
)  # fmt: skip
V3 = "DeepSeek-V3"
# As DeepSeek publishes it: nothing says which layers stay as they are.
BLOCKS = Variant(
    {n: v for n, v in fp8_config([16, 16]).items() if n != "modules_to_not_convert"},
    ((r"embed_tokens|lm_head|mlp\.gate$", None), ("", fp8_kind(16, 16))),
)


def generate(path: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01) | options
    with LLM(str(path), max_model_len=64, **options) as llm:
        prompts = [[*range(40, 40 + n)] for n in (3, 20)]
        return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]


def load(path: Path, ranks: Ranks = ALONE) -> CausalLM:
    config = ModelConfig.from_dir(path)
    formats = choose_formats(Config(str(path)), config, path)
    model = build_model(config, 64, ranks, formats=formats)
    load_model(model, path)
    model.bind(Backend(TorchBackend(), PLAIN))
    return model


def expansion(ranks: Ranks, weight: torch.Tensor) -> LatentExpansion:
    layer = LatentExpansion(SIZES, ranks)
    layer.weight_loader(layer.get_parameter("weight"), weight, None)
    return layer


def adapters(ranks: Ranks, part: slice) -> tuple[LowRank, torch.Tensor]:
    """Three slots with ranks 2, 0 and 3 of 3, and what they add to the weight."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(3, 3, SIZES.rank, generator=generator)
    b = torch.randn(3, 3, SIZES.expanded_size, generator=generator)
    numbers = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    used = torch.arange(3) < numbers  # [slots, R]
    added = torch.einsum("srk,srn->snk", a * used[..., None], b)
    size = SIZES.expanded_size // ranks.size
    return LowRank(a, b[..., part].contiguous(), numbers, (size,)), added


def spelt(ranks: Ranks) -> str:
    return f"rank {ranks.rank} of {ranks.size}"


@pytest.mark.parametrize("ranks", [ALONE, Ranks(0, 3), Ranks(2, 3)], ids=spelt)
@pytest.mark.parametrize("is_bound", [False, True])
def test_adapters_of_the_expansion_are_those_of_each_row(ranks: Ranks, is_bound: bool) -> None:
    """Rows of other slots, and what slots have beyond their ranks, add nothing."""
    weight = torch.randn(SIZES.expanded_size, SIZES.rank)
    part = ranks.equal_slice(SIZES.expanded_size)
    layer, (low_rank, added) = expansion(ranks, weight), adapters(ranks, part)
    layer.low_rank = low_rank
    if is_bound:
        layer.bind(Backend(TorchBackend(), PLAIN))
    slots = torch.tensor([0, -1, 2, 1, 0, 2], dtype=torch.int32)
    heads = SIZES.num_heads // ranks.size
    queries, sums = torch.randn(6, heads, SIZES.plain), torch.randn(6, heads, SIZES.rank)
    with reading({ADAPTERS: group_rows(slots, 3, PLAIN)}):
        whole = torch.empty(6, heads, SIZES.rank + SIZES.rotated)
        folded, values = whole[..., : SIZES.rank], layer.unfold(sums)
        layer.fold(queries, folded)
    for row, slot in enumerate(slots.tolist()):
        adapted = weight + added[slot] if slot >= 0 else weight
        to_keys, to_values = adapted[part].view(heads, -1, SIZES.rank).split([12, 10], 1)
        torch.testing.assert_close(folded[row], torch.einsum("hd,hdr->hr", queries[row], to_keys))
        torch.testing.assert_close(values[row], torch.einsum("hr,hdr->hd", sums[row], to_values))


@pytest.mark.parametrize("ranks", [ALONE, Ranks(1, 2)], ids=spelt)
def test_blocks_of_fp8_are_read_as_published(ranks: Ranks, tmp_path: Path) -> None:
    """The last block of the rows of kv_a_proj_with_mqa is not full, and that of each rank."""
    path = quantize(write(tmp_path, SAMPLES[V3]), BLOCKS)
    exact, model = dequantized(path), load(path, ranks)
    layer: Any = model.get_submodule("model.layers.1.self_attn.kv_b_proj")
    weight = exact["model.layers.1.self_attn.kv_b_proj.weight"]
    assert torch.equal(layer.matrix.plain(), weight[ranks.equal_slice(len(weight))])
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        layer = model.get_submodule(f"model.layers.1.self_attn.{name}")
        x = torch.eye(layer.rank_part.num_columns)
        expected = exact[f"model.layers.1.self_attn.{name}.weight"]
        assert (layer(x).t() - expected).abs().max() < 1e-5


def test_models_of_fp8_blocks_generate(tmp_path: Path) -> None:
    """Inputs are rounded too, so that only the first tokens are those of the exact weights."""
    path = quantize(write(tmp_path, SAMPLES[V3]), BLOCKS)
    found, exact = generate(path), generate(path / DEQUANTIZED)
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in exact]


def test_quantizing_while_loading_leaves_the_expansion_plain(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES[V3])
    with LLM(str(path), device="cpu", dtype="float32", quantization="int8") as llm:
        mixer: Any = llm.model_runner.shard.model.model.layers[0].self_attn
        weight = load_file(path / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
        assert torch.equal(mixer.kv_b_proj.matrix.plain(), weight)
        assert mixer.o_proj.weight_format.scheme is not None


def test_layers_that_predict_later_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files have them behind the last layer; the log says that they are not used."""
    path = write(tmp_path, SAMPLES[V3])
    expected, file = generate(path), path / "model.safetensors"
    more = {f"model.layers.3.{name}.weight": torch.ones(8) for name in ("eh_proj", "mlp.gate")}
    save_file(load_file(file) | more, file, {"format": "pt"})
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert generate(path) == expected
    assert "model.layers.3.eh_proj.weight" in caplog.text
    edit_config(path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"model\.layers\.3\."):
        generate(path)


def test_published_models_have_their_scales_and_groups() -> None:
    """In V3 a group is as good as its two best experts together, in V2 as its best one."""
    v3, v2 = (ModelConfig.parse(PUBLISHED[f"DeepSeek-{name}"].file) for name in ("V3", "V2"))
    assert isinstance(v3, SparseLatentConfig) and isinstance(v2, SparseLatentConfig)
    assert math.isclose(v3.latent.scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert math.isclose(v2.latent.scale, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert v3.experts.routing.groups == ExpertGroups(8, 4, best=2)
    assert v2.experts.routing.groups == ExpertGroups(8, 3, best=1)
    assert v3.later == ("model.layers.61.",)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (V3, dict(num_key_value_heads=2), "num_key_value_heads=2 must equal num_attention_heads=4"),
        (V3, dict(head_dim=16), "head_dim=16 and qk_rope_head_dim=8 differ"),
        (V3, dict(qk_rope_head_dim=7, head_dim=None), "qk_rope_head_dim must be even, got 7"),
        (V3, dict(scoring_func="softmax"), "scoring_func must be 'sigmoid', got 'softmax'"),
        (V3, dict(topk_group=5), "topk_group"), (V3, dict(n_group=3), "n_group=3 must divide"),
        (V3, dict(moe_layer_freq=2), "moe_layer_freq must be 1"),
        ("DeepSeek-V2", dict(norm_topk_prob=True), "norm_topk_prob must be False, got True"),
        ("DeepSeek-V2", dict(topk_method="noaux_tc"), "topk_method must be one of 'greedy'"),
        ("DeepSeek-V2", dict(mlp_bias=True), "mlp_bias must be False"),
        ("GLM-4.7-Flash", dict(first_k_dense_replace=2), "first_k_dense_replace=2 contradicts"),
        ("GLM-4.7-Flash", dict(num_local_experts=9), "num_local_experts=9 and n_routed_experts=8"),
        (V3, dict(num_mtp_layers=3, num_nextn_predict_layers=1), "num_mtp_layers=3 and num_nextn"),
        (V3, dict(num_local_experts=9), "num_local_experts=9 and n_routed_experts=8 differ"),
        ("DeepSeek-V2", dict(num_experts=9), "num_experts=9 and n_routed_experts=8 differ"),
        ("DeepSeek-V2", dict(n_group=None), "n_group must be an int >= 1, got None"),
        ("DeepSeek-V2", dict(topk_group=None), "topk_group must be an int"),
        ("Mistral 4", dict(partial_rotary_factor=0.9), "partial_rotary_factor=0.9 of qk_nope"),
        ("Mistral 4", dict(num_local_experts=9), "num_local_experts=9 and n_routed_experts"),
        ("GLM-4.7-Flash", dict(mlp_layer_types=["dense"]), "mlp_layer_types has 1 entries"),
        ("Mistral 4", dict(qk_nope_head_dim=20), "partial_rotary_factor"),
        ("MiniCPM3", dict(scale_depth=-1.0), "scale_depth"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_computed_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, replace(SAMPLES[name], adjust=None))
    edit_config(path, **changes)
    with pytest.raises((TypeError, ValueError), match=message):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("DeepSeek-V3", "num_local_experts"), ("DeepSeek-V2", "num_experts"),
        ("GLM-4.7-Flash", "num_local_experts"), ("Mistral-Small-4-119B", "num_local_experts"),
    ],
)  # fmt: skip
def test_the_number_of_experts_has_another_name(name: str, theirs: str) -> None:
    file = {**PUBLISHED[name].file}
    assert file.pop("n_routed_experts") != 96
    found = ModelConfig.parse({**file, theirs: 96})
    assert isinstance(found, SparseLatentConfig) and found.experts.num_experts == 96


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mistral-Small-4-119B"])
def test_a_null_of_neighbours_is_false(name: str) -> None:
    """As in transformers; an absent one is true."""
    file = {n: v for n, v in PUBLISHED[name].file.items() if n != "rope_interleave"}
    for changes, expected in (({}, True), ({"rope_interleave": None}, False)):
        found = ModelConfig.parse(file | changes)
        assert isinstance(found, SparseLatentConfig) and found.latent.interleaved is expected


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_part_at_the_top_level_changes_nothing(part: float) -> None:
    """The sizes say the same, or that the rotated part is rotated whole."""
    file = PUBLISHED["Mistral-Small-4-119B"].file
    assert ModelConfig.parse(file | {"partial_rotary_factor": part}) == ModelConfig.parse(file)
