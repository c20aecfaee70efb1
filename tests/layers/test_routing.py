"""Routers by their stated choices, and shared experts, against transformers' modules."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import SHAPE
from thread_ranks import on_ranks
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.operands.routing import ExpertGroups, Routing
from nanovllm.kernels.plain.choose_experts import choose_experts
from nanovllm.layers.layer import Build
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.shared_experts import SharedSparseMLP
from nanovllm.layers.sparse_mlp import ExpertRouter
from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import expert_groups, layers_after_dense
from nanovllm.models.fields import Fields
from nanovllm.models.loader import checkpoint_targets, fill_param
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, EXPERTS, TAKEN = 48, 16, 5
GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
BEST_TWO, BEST = ExpertGroups(4, 2, best=2), ExpertGroups(4, 2, best=1)


def theirs(name: str, router: Callable[[Any], Any], **fields: Any) -> Any:
    """A router of transformers with random values."""
    torch.manual_seed(0)
    sizes = dict(num_experts_per_tok=TAKEN, hidden_size=HIDDEN)
    config = getattr(transformers, f"{name}Config")(**(sizes | fields))
    config.num_experts = config.num_local_experts = EXPERTS
    module = router(config).eval()
    weight_of(module).data.normal_(0.0, 0.3)
    for bias in biases_of(module):
        bias.data.normal_(0.0, 0.3)
    return module


def weight_of(router: Any) -> torch.Tensor:
    """A router's weight [E, hidden]."""
    weight: torch.Tensor = next(each for each in router.parameters() if each.shape[0] == EXPERTS)
    return weight


def biases_of(router: Any) -> list[torch.Tensor]:
    """The bias [E] or [1, E] that is added for the choice, if the router has one."""
    state = router.state_dict(keep_vars=True)
    return [each for name, each in state.items() if name.endswith("e_score_correction_bias")]


def deepseek(normalized: bool) -> Routing:
    return Routing(
        per_token=TAKEN, normalized=normalized, scores="sigmoid", has_bias=True, groups=BEST_TWO,
        scale=2.5,
    )  # fmt: skip


ROUTERS: dict[str, tuple[Any, Routing]] = {
    "DeepSeek-V3": (
        lambda: theirs("DeepseekV3", DeepseekV3TopkRouter, **GROUPS, norm_topk_prob=True),
        deepseek(normalized=True),
    ),
    "DeepSeek-V3, not normalized": (
        lambda: theirs("DeepseekV3", DeepseekV3TopkRouter, **GROUPS, norm_topk_prob=False),
        deepseek(normalized=False),
    ),
    "GLM-4.5, one group": (
        lambda: theirs("Glm4Moe", Glm4MoeTopkRouter, n_group=1, topk_group=1,
                       routed_scaling_factor=1.5, norm_topk_prob=True),
        Routing(per_token=TAKEN, normalized=True, scores="sigmoid", has_bias=True, scale=1.5),
    ),
    "ERNIE 4.5, a floor above most sums": (
        lambda: theirs("Ernie4_5_Moe", Ernie4_5_MoeTopKRouter, moe_norm_min=0.6),
        Routing(per_token=TAKEN, normalized=True, has_bias=True, tiny=0.0, least=0.6),
    ),
    "ERNIE 4.5, a floor below all sums": (
        lambda: theirs("Ernie4_5_Moe", Ernie4_5_MoeTopKRouter),
        Routing(per_token=TAKEN, normalized=True, has_bias=True, tiny=0.0, least=1e-12),
    ),
    "HunYuan": (
        lambda: theirs("HunYuanMoEV1", HunYuanMoEV1Gate),
        Routing(per_token=TAKEN, normalized=True),
    ),
    "DeepSeek-V2": (
        lambda: theirs("DeepseekV2", DeepseekV2TopkRouter, **GROUPS, num_attention_heads=4,
                       topk_method="group_limited_greedy"),
        Routing(per_token=TAKEN, normalized=False, groups=BEST, scale=2.5),
    ),
    "Mixtral": (
        lambda: theirs("Mixtral", MixtralTopKRouter), Routing(per_token=TAKEN, normalized=True)
    ),
    "Qwen2-MoE": (
        lambda: theirs("Qwen2Moe", Qwen2MoeTopKRouter, norm_topk_prob=False),
        Routing(per_token=TAKEN, normalized=False),
    ),
    "GraniteMoE": (
        lambda: theirs("GraniteMoe", GraniteMoeTopKRouter),
        Routing(per_token=TAKEN, normalized=False, scores="softmax of chosen"),
    ),
    "Phi-3.5-MoE": (
        lambda: theirs("Phimoe", PhimoeTopKRouter, num_experts_per_tok=2, num_local_experts=EXPERTS,
                       router_jitter_noise=0.2),
        Routing(per_token=2, normalized=False, scores="sparse mixer", margin=0.4),
    ),
}  # fmt: skip


def by_expert(shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The share of each expert [T, E], as the order of a token's experts means nothing."""
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return torch.zeros(len(ids), EXPERTS).scatter(1, ids, shares)


@torch.inference_mode()
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_as_transformers_does(name: str) -> None:
    """A choice that is left out, or made in another order, gives other experts or shares."""
    make, routing = ROUTERS[name]
    module, router = make(), ExpertRouter(HIDDEN, EXPERTS, routing)
    router.get_parameter("weight").copy_(weight_of(module))
    biases = biases_of(module)
    assert len(biases) == routing.has_bias
    for bias in biases:
        router.get_parameter("e_score_correction_bias").copy_(bias.flatten())
    x = torch.randn(200, HIDDEN)
    _, *expected = module(x)
    torch.testing.assert_close(by_expert(*router.select(x)), by_expert(*expected))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax of chosen"])
def test_ties_are_decided_as_by_topk(scores: Any) -> None:
    """Equal outputs are usual in rows that an earlier layer made equal."""
    outputs = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0, 0.5], [0.0] * 6])
    routing = Routing(per_token=4, normalized=True, scores=scores)
    assert torch.equal(choose_experts(outputs, routing)[1], outputs.topk(4).indices)


def test_outputs_that_all_give_a_sigmoid_of_zero_have_no_nan() -> None:
    routing = Routing(per_token=2, normalized=True, scores="sigmoid")
    shares, _ = choose_experts(torch.full((1, 4), -200.0), routing)
    assert shares.tolist() == [[0.0, 0.0]]


def test_only_choices_that_the_fused_kernel_computes_use_it() -> None:
    """With the kernel, other choices would be left out."""
    plain = Routing(per_token=2, normalized=True)
    assert plain.is_fused and Routing(per_token=2, normalized=False).is_fused
    chosen = Routing(per_token=2, normalized=False, scores="softmax of chosen")
    assert chosen.is_fused and chosen.sums_to_one
    assert Routing(per_token=2, normalized=True, scores="sigmoid", has_bias=True).is_fused
    others: list[dict[str, Any]] = [
        dict(groups=BEST), dict(scores="sparse mixer"), dict(least=1e-12),
        dict(scores="softmax of chosen", has_bias=True),
        dict(scores="softmax of chosen", scale=2.0),
    ]  # fmt: skip
    assert not any(Routing(per_token=2, normalized=True, **each).is_fused for each in others)


# Shared experts


def filled(part: SharedSparseMLP, weights: dict[str, torch.Tensor]) -> SharedSparseMLP:
    """The part with a checkpoint's tensors."""
    holder: Any = torch.nn.Module()
    holder.mlp, holder.names, holder.tied_weights = part, PLAIN_FORMATS.names, {}
    targets = checkpoint_targets(holder)
    assert targets.keys() >= weights.keys()
    for name, tensor in weights.items():
        fill_param(holder, targets[name].param, targets[name].shard_id, tensor)
    return part


@torch.inference_mode()
@pytest.mark.parametrize("whole", [False, True])
def test_shared_experts_are_added_as_in_deepseek(whole: bool) -> None:
    """On two ranks that split each expert, or the list of experts: each adds its part once."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=TAKEN,
        moe_intermediate_size=8, n_shared_experts=2, **GROUPS,
    )  # fmt: skip
    module = DeepseekV3MoE(config)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.normal_(0.0, 0.3)
    weights = {f"mlp.{name}": tensor for name, tensor in module.state_dict().items()}
    x = torch.randn(30, HIDDEN)

    def run(ranks: Ranks) -> torch.Tensor:
        make = Build(ranks, PLAIN_FORMATS, 16, whole)
        routing = deepseek(config.norm_topk_prob)
        part = SharedSparseMLP(make, HIDDEN, 8, EXPERTS, routing, shared_size=16)
        return filled(part, weights)(x)

    total = torch.stack(on_ranks(2, run)).sum(0)
    torch.testing.assert_close(total, module(x[None])[0], rtol=1e-4, atol=1e-5)


# Fields of configs


def fields(**given: Any) -> Fields:
    return Fields(given, dict(n_group=1, topk_group=1, num_experts_per_tok=4))


def test_groups_are_read() -> None:
    assert expert_groups(fields(n_group=4, topk_group=2), 16) == BEST_TWO
    assert expert_groups(fields(n_group=4, topk_group=2), 16, best=1) == BEST
    for none in (dict(n_group=1), dict(n_group=None), dict(n_group=4, topk_group=4)):
        assert expert_groups(fields(**none), 16) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(n_group=3), "n_group=3 must divide the number of experts, 16"),
        (dict(n_group=16, topk_group=8), "n_group=16 must divide .* into groups of at least 2"),
        (dict(n_group=4, topk_group=5), "topk_group must be in [1, 4], got 5"),
        (dict(n_group=8, topk_group=1), "num_experts_per_tok=4: topk_group=1 groups have 2"),
        (dict(n_group=0), "n_group must be in [1, 16], got 0"),
    ],
)
def test_impossible_groups_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says).replace(r"\.\*", ".*")):
        expert_groups(fields(**given), 16)


def test_the_first_layers_may_be_dense() -> None:
    given = fields(first_k_dense_replace=2, num_hidden_layers=4)
    assert layers_after_dense(given) == {2, 3}


ROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.5] * 8, long_factor=[3.0] * 8,
    short_mscale=1.2, long_mscale=1.7, original_max_position_embeddings=64,
)  # fmt: skip


def phi(**changes: Any) -> dict[str, Any]:
    names = dict(architectures=["PhimoeForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
    return SHAPE | names | dict(rope_parameters=ROPE) | changes


@pytest.mark.parametrize(("length", "factor", "scale"), [(64, 1.5, 1.2), (65, 3.0, 1.7)])
def test_longrope_of_phi_has_its_factors_by_the_length_of_contexts(
    length: int, factor: float, scale: float
) -> None:
    config = ModelConfig.parse(phi())
    table = build_model(config, length).model.ropes["rope"].get_buffer("table")
    angles = torch.arange(length)[:, None] / factor / 1e4 ** (torch.arange(8) / 8)
    torch.testing.assert_close(table[:, 0], angles.cos() * scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(num_experts_per_tok=3), "num_experts_per_tok must be in [2, 2], got 3"),
        (dict(num_local_experts=1), "num_local_experts"),
        (dict(router_jitter_noise=-0.1), "router_jitter_noise"),
        (dict(lm_head_bias=True, tie_word_embeddings=True), "lm_head_bias"),
        (dict(rope_parameters=ROPE | {"long_mscale": None}), "long_mscale"),
        (
            dict(rope_parameters={n: v for n, v in ROPE.items() if n != "short_mscale"}),
            "'longrope' needs a short_mscale",
        ),
    ],
)
def test_what_phi_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        ModelConfig.parse(phi(**changes))
