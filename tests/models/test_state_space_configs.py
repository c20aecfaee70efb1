"""Configs of models with state spaces: what is refused, and other spellings."""

import copy
from typing import Any

import pytest
from families.spaces import PUBLISHED

from nanovllm.layers.cache_spec import KeysAndValues, State
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import family_of

MAMBA2, GRANITE = "Codestral Mamba 7B", "granite-4.0-h-tiny"
FALCON, NEMOTRON, NANO = "Falcon-H1-0.5B", "Nemotron-H-8B", "Nemotron-3-Nano-30B-A3B"


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.parse({**copy.deepcopy(PUBLISHED[name].file), **changes})


INFINITY = float("inf")
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (MAMBA2, dict(num_heads=96), "num_heads: 96 heads of 64 channels contradict expand=2"),
    (MAMBA2, dict(n_groups=3), "num_heads=128, n_groups=3"),
    (MAMBA2, dict(time_step_limit=[0.0]), "time_step_limit must be a list of two numbers"),
    (MAMBA2, dict(time_step_limit=[1.0, 0.5]), "time_step_limit must be"),
    (MAMBA2, dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
    (MAMBA2, dict(layer_norm_epsilon=0.0), "layer_norm_epsilon must be"),
    (MAMBA2, dict(conv_kernel=1), "conv_kernel must be"),
    (MAMBA2, dict(rms_norm=False), "rms_norm must be true, got False"),
    (MAMBA2, dict(norm_before_gate="no"), "norm_before_gate must be"),
    (GRANITE, dict(layer_types=["mamba"]), "layer_types has 1 entries, num_hidden_layers=40"),
    (GRANITE, dict(layer_types=["conv"] * 40), "layer_types .* are not supported"),
    (GRANITE, dict(layers_block_type=["mamba"] * 40), "layer_types and layers_block_type differ"),
    (GRANITE, dict(position_embedding_type="learned"), "position_embedding_type must be 'rope'"),
    (GRANITE, dict(num_experts_per_tok=65), "num_experts_per_tok must be"),
    (GRANITE, dict(mamba_d_head=32), "mamba_d_head: 48 heads of 32 channels contradict"),
    (FALCON, dict(mamba_d_ssm=1000), "mamba_n_heads=24 times mamba_d_head=64 must be 1000"),
    (FALCON, dict(mamba_d_head="auto", mamba_d_ssm=1000), "mamba_n_heads=24 must divide the 1000"),
    (FALCON, dict(ssm_multipliers=[1.0] * 4), "ssm_multipliers must be a list of 5 numbers"),
    (FALCON, dict(mlp_multipliers=[1.0, 0.0]), "mlp_multipliers must be"),
    (FALCON, dict(key_multiplier="1"), "key_multiplier must be a number"),
    (FALCON, dict(mamba_use_mlp=False), "mamba_use_mlp must be true, got False"),
    (FALCON, dict(attn_layer_indices=[1, 5]), r"attn_layer_indices must .*; got \[1, 5\]"),
    (NEMOTRON, dict(hybrid_override_pattern="MX"), "hybrid_override_pattern must have letters"),
    (NEMOTRON, dict(hybrid_override_pattern="M-"), "num_hidden_layers=52, but there are 2"),
    (NEMOTRON, dict(layers_block_type=["mamba"] * 52), "contradicts the list of layer types"),
    (NEMOTRON, dict(mlp_hidden_act="silu"), "mlp_hidden_act must be 'relu2'"),
    (NEMOTRON, dict(mamba_n_groups=4), "mamba_n_groups=4 and n_groups=8 differ"),
    (NANO, dict(moe_latent_size=0), "moe_latent_size must be"),
    (NANO, dict(n_shared_experts=2), "n_shared_experts must be 1, got 2"),
    (NEMOTRON, dict(time_step_limit=[0.0, 0.1]), r"time_step_limit=\[0.0, 0.1\] is not supported"),
    (NEMOTRON, dict(time_step_limit=[0.01, INFINITY]), "other limit than time_step_min=0.001"),
    (NEMOTRON, dict(mamba_dt_limit=[0.0, 0.1]), "mamba_dt_limit=.* and time_step_limit=.* differ"),
    (NANO, dict(topk_group=2), r"topk_group must be in \[1, 1\], got 2"),
    (NANO, dict(n_group=3), "n_group=3 must divide the number of experts"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_errors_name_the_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read(name, **changes)


def test_an_infinite_limit_is_spelt_in_two_ways() -> None:
    tagged = {"__float__": "Infinity"}
    assert read(MAMBA2, time_step_limit=[0.0, tagged]) == read(MAMBA2)
    assert read(MAMBA2, time_step_limit=[0.0, 1.0]) != read(MAMBA2)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        (NEMOTRON, dict(time_step_limit=[0.001, INFINITY])),  # as transformers computes it
        (NEMOTRON, dict(time_step_limit=None)),
        (FALCON, dict(mamba_use_mlp=None, attn_layer_indices=[*range(36)])),
        (FALCON, dict(attn_layer_indices=None)),
        (MAMBA2, dict(rms_norm=None)),
        (MAMBA2, dict(norm_before_gate=False)),  # published files say true, and mean this
    ],
)
def test_fields_that_say_what_is_computed(name: str, same: dict[str, Any]) -> None:
    assert read(name, **same) == read(name)


def test_layers_have_the_kinds_of_the_pattern() -> None:
    kinds = ["mamba" if c == "M" else "moe" if c == "E" else "attention" for c in "ME*E"]
    listed = read(NANO, hybrid_override_pattern=None, layers_block_type=kinds, num_hidden_layers=4)
    assert listed == read(NANO, hybrid_override_pattern="ME*E", num_hidden_layers=4)
    kept = [[type(cache) for cache in layer.cache.each] for layer in listed.layers]
    assert [len(each) for each in kept] == [1, 0, 1, 0]
    assert kept[2] == [KeysAndValues] and listed.longest_window is None
    both = [type(cache) for cache in read(FALCON).layers[0].cache.each]
    assert both[0] is KeysAndValues and issubclass(both[1], State)


def test_rules_of_quantized_files_name_fused_layers_of_granite() -> None:
    names = family_of("GraniteMoeHybridForCausalLM").names
    for ours, theirs in {
        "mlp.shared_expert.gate_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
        "mamba.in_proj": "mamba.in_proj", "self_attn.q_proj": "self_attn.q_proj",
    }.items():  # fmt: skip
        assert names.theirs(f"model.layers.0.{ours}") == f"model.layers.0.{theirs}"
    assert names.theirs("lm_head") == "lm_head"


@pytest.mark.parametrize(
    ("name", "fit", "not_fit"),
    [(MAMBA2, [1, 2, 4, 8, 16], [3, 5]), (GRANITE, [2, 4], [8]), (FALCON, [2, 4, 8], [3])],
)
def test_ranks_divide_heads_and_repeat_groups(
    name: str, fit: list[int], not_fit: list[int]
) -> None:
    config = read(name)
    for size in fit:
        config.check_parallel_size(size)
    for size in not_fit:
        with pytest.raises(ValueError, match="cannot split"):
            config.check_parallel_size(size)
    uneven = read(MAMBA2, num_heads=96, hidden_size=3072, n_groups=6)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 cannot split groups=6"):
        uneven.check_parallel_size(4)


def test_fields_of_experts_mean_nothing_without_them() -> None:
    none = dict(n_routed_experts=0, moe_intermediate_size=None)
    assert read(NEMOTRON, **none) == read(NEMOTRON)
