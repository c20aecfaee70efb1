"""What the configs of MiniMax-M2, Trinity, Laguna and MiMo-V2 say, and what is refused."""

import re
from typing import Any

import pytest
from families.sigmoid_experts import FULL, PUBLISHED, SLIDING
from transformers import MiMoV2FlashConfig

from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import SparseConfig
from nanovllm.models.kind_ropes import KindRopesConfig
from nanovllm.models.laguna import LagunaConfig
from nanovllm.models.mimo_v2 import MiMoV2Config

MINIMAX, NANO, MINI, LAGUNA, MIMO = PUBLISHED
HALF = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def read(name: str, **changes: Any) -> Any:
    file = {n: v for n, v in (PUBLISHED[name].file | changes).items() if v != "left out"}
    return ModelConfig.parse(file)


def test_every_spelling_of_a_published_file_is_one_model() -> None:
    """As transformers writes the file again, and with what the defaults say left out."""
    rewritten = dict(rotary_dim=None, rope_theta=None, rope_parameters=HALF)
    assert read(MINIMAX, **rewritten) == read(MINIMAX)
    assert read(NANO, layer_types=[*[SLIDING] * 3, FULL] * 14) == read(NANO)
    assert read(LAGUNA, mlp_layer_types=None, gating=True) == read(LAGUNA)
    names = ["hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "swa_rope_theta",
             "partial_rotary_factor", "layernorm_epsilon"]  # fmt: skip
    assert read(MIMO, **dict.fromkeys(names, "left out")) == read(MIMO)
    theirs = MiMoV2FlashConfig(**PUBLISHED[MIMO].file).to_dict() | dict(
        architectures=PUBLISHED[MIMO].file["architectures"], dtype=None
    )
    assert ModelConfig.parse(theirs) == read(MIMO)


@pytest.mark.parametrize(
    ("name", "parts"), [(MIMO, (0.334, 0.334)), (LAGUNA, (1.0, 1.0))], ids=["MiMo", "Laguna"]
)
def test_a_rope_without_a_part_rotates_that_of_transformers(
    name: str, parts: tuple[float, float]
) -> None:
    ropes = {FULL: dict(rope_theta=5e6), SLIDING: dict(rope_theta=1e4)}
    config = read(name, rope_parameters=ropes, partial_rotary_factor=None)
    both = config.rope_parameters, config.sliding_rope_parameters
    assert tuple(rope["partial_rotary_factor"] for rope in both) == parts


@pytest.mark.parametrize("name", [LAGUNA, MIMO])
@pytest.mark.parametrize("old", [{}, {"type": "default"}, {"rope_type": "default"}], ids=str)
def test_a_default_scaling_is_none(name: str, old: dict[str, str]) -> None:
    assert read(name, rope_scaling=old) == read(name)


def test_what_says_nothing_is_as_absent() -> None:
    """No list of dense layers, and an interval that nothing uses next to a list of types."""
    plain = dict(mlp_layer_types=None, mlp_only_layers=None)
    assert read(LAGUNA, **plain | {"mlp_only_layers": []}) == read(LAGUNA, **plain)
    assert read(MINI, global_attn_every_n_layers=None) == read(MINI)


def test_experts_of_mimo_have_another_name() -> None:
    assert read(MIMO, n_routed_experts="left out", num_local_experts=256) == read(MIMO)


def test_layers_of_mimo_have_heads_windows_and_ropes_of_their_own() -> None:
    config = read(MIMO)
    assert isinstance(config, MiMoV2Config)
    full, sliding = (config.layer_shape(index) for index in (0, 1))
    assert [each.cache.heads for each in (full, sliding)] == [(64, 4, 192), (64, 8, 192)]
    assert config.sliding_windows[:7] == (None, 129, 129, 129, 129, None, 129)
    assert (full.needs, sliding.needs) == (frozenset(), {"sinks"})
    sizes = {m.name.rpartition(".")[2]: m[1:3] for m in sliding.matrices[:4]}
    assert sizes["v_proj"] == (8 * 128, 4096) and sizes["o_proj"] == (4096, 64 * 128)
    thetas = config.rope_parameters["rope_theta"], config.sliding_rope_parameters["rope_theta"]
    assert thetas == (5e6, 1e4) and config.experts.layers == {*range(1, 48)}
    assert read(MIMO, swa_num_key_value_heads=16).heads(1).num_kv_heads == 16


def test_layers_of_laguna_have_query_heads_and_ropes_of_their_own() -> None:
    config = read(LAGUNA)
    assert isinstance(config, LagunaConfig) and isinstance(config, KindRopesConfig)
    assert [config.heads(index).num_heads for index in range(5)] == [48, 72, 72, 72, 48]
    assert config.sliding_rope_parameters["partial_rotary_factor"] == 1.0
    assert config.rope_parameters["factor"] == 128.0
    assert (config.gates, read(LAGUNA, gating="per-element", gating_types=None).gates) == (1, 128)
    assert config.experts.routing.soft_cap is None
    assert read(LAGUNA, moe_router_logit_softcapping=2).experts.routing.soft_cap == 2.0


def test_only_layers_of_trinity_with_a_window_rotate() -> None:
    config = read(MINI)
    assert config.sliding_windows[:4] == (2048, 2048, 2048, None)
    assert config.rotated_layers[:4] == (True, True, True, False)
    assert config.embedding_scale == 2048**0.5
    assert isinstance(config, SparseConfig) and config.experts.layers == {*range(2, 32)}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (MINIMAX, dict(use_qk_norm=False), "use_qk_norm must be True"),
        (MINIMAX, dict(scoring_func="softmax"), "scoring_func must be 'sigmoid'"),
        (MINIMAX, dict(attn_type_list=[1, 0] * 31), "attn_type_list must be 62 times 1"),
        (MINIMAX, dict(attn_type_list=[1]), "attn_type_list must be 62 times 1"),
        (MINIMAX, dict(rotary_dim=0), "rotary_dim must be"),
        (MINIMAX, dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25 and rotary_dim=64"),
        (MINIMAX, dict(rope_parameters=HALF | {"rope_theta": 1e4}), "differ"),
        (MINIMAX, dict(num_experts_per_tok=257), "num_experts_per_tok must be in [1, 256]"),
        (NANO, dict(n_group=2), "n_group must be 1"),
        (NANO, dict(route_norm=False), "route_norm must be True"),
        (NANO, dict(attention_bias=True), "attention_bias must be False"),
        (NANO, dict(sliding_window=None), "sliding_window is not set"),
        (NANO, dict(global_attn_every_n_layers=0), "global_attn_every_n_layers must be"),
        (NANO, dict(global_attn_every_n_layers=None), "global_attn_every_n_layers must be"),
        (NANO, dict(num_shared_experts=0), "num_shared_experts must be"),
        (NANO, dict(mup_enabled=1), "mup_enabled must be"),
        (LAGUNA, dict(gating=False), "gating must be true, 'per-head' or 'per-element'"),
        (LAGUNA, dict(gating="per-element"), "gating_types="),
        (LAGUNA, dict(gating_types="per_head"), "gating_types must be a list"),
        (LAGUNA, dict(gating_types=["per_head"]), "gating_types has 1 entries"),
        (LAGUNA, dict(gating_types=["other"] * 48), "gating_types ['other', 'other',"),
        (LAGUNA, dict(mlp_only_layers=[]), "mlp_only_layers=[] contradicts mlp_layer_types"),
        (LAGUNA, dict(mlp_only_layers=[1]), "mlp_only_layers=[1] contradicts mlp_layer_types"),
        (LAGUNA, dict(mlp_layer_types=["moe"] * 48), "mlp_layer_types"),
        (LAGUNA, dict(num_attention_heads_per_layer=[48]), "must be a list of 48 numbers"),
        (LAGUNA, dict(num_attention_heads_per_layer=[48] * 47 + [4]), "multiples of"),
        (LAGUNA, dict(rope_parameters=HALF), "rope_parameters must have the parameters of"),
        (LAGUNA, dict(rope_parameters={FULL: HALF}), "of sliding_attention must have a rope_theta"),
        (LAGUNA, dict(rope_scaling=HALF), "rope_scaling must be null"),
        (MIMO, dict(rope_scaling={"type": "linear"}), "rope_scaling must be null"),
        (LAGUNA, dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25 is that of no rope"),
        (
            LAGUNA,
            dict(rope_parameters={FULL: HALF, SLIDING: HALF | {"partial_rotary_factor": 0.26}}),
            "rope_parameters of sliding_attention: partial_rotary_factor=0.26 of head_dim=128",
        ),
        (LAGUNA, dict(moe_router_logit_softcapping=-1.0), "moe_router_logit_softcapping must be"),
        (LAGUNA, dict(moe_apply_router_weight_on_input=True), "on_input must be False"),
        (MIMO, dict(v_head_dim=256, swa_v_head_dim=None), "v_head_dim must be in [1, 192]"),
        (MIMO, dict(swa_head_dim=128), "swa_head_dim must be 192"),
        (MIMO, dict(add_full_attention_sink_bias=True), "sink_bias must be False"),
        (MIMO, dict(hybrid_layer_pattern=[0, 1]), "hybrid_layer_pattern must be a list of 48"),
        (MIMO, dict(layer_types=[FULL] * 48), "contradicts layer_types"),
        (MIMO, dict(mlp_layer_types=["sparse"] * 48), "moe_layer_freq="),
        (MIMO, dict(swa_num_key_value_heads=5), "must be a multiple of swa_num_key_value_heads=5"),
        (MIMO, dict(rms_norm_eps=1e-6), "layernorm_epsilon=1e-05 and rms_norm_eps=1e-06 differ"),
        (MIMO, dict(layernorm_epsilon=0), "layernorm_epsilon must be"),
        (MIMO, dict(sliding_window_size=0), "sliding_window_size must be"),
        (MIMO, dict(num_local_experts=8), "num_local_experts=8 and n_routed_experts=256 differ"),
        (MIMO, dict(n_group=3), "n_group=3 must divide"),
        (MIMO, dict(n_shared_experts=1), "n_shared_experts must be 0"),
    ],
)
def test_contradictions_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(name, **changes)
