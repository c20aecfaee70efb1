"""Configs of Kimi Linear and Ling 3: what is refused, and which fields say the same."""

import copy
from typing import Any

import pytest
from families.delta_latents import PUBLISHED

from nanovllm.layers.cache_spec import State
from nanovllm.layers.latent import Latent
from nanovllm.models.config import ModelConfig
from nanovllm.models.delta_latents import DeltaLatentConfig

KIMI, LING = "Kimi-Linear-48B-A3B", "Ling-3.0-Flash"
LINEAR, FULL = "linear_attention", "full_attention"


def read(name: str, **changes: Any) -> DeltaLatentConfig:
    config = ModelConfig.parse({**copy.deepcopy(PUBLISHED[name].file), **changes})
    assert isinstance(config, DeltaLatentConfig)
    return config


def nested(**changes: Any) -> dict[str, Any]:
    return dict(linear_attn_config=PUBLISHED[KIMI].file["linear_attn_config"] | changes)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (KIMI, dict(linear_attn_config=[1]), "linear_attn_config must be an object"),
    (KIMI, nested(kda_layers=[1, 2]), "linear_attn_config: .* each of the numbers 1 to 27 once"),
    (KIMI, nested(full_attn_layers="all"), r"linear_attn_config\.full_attn_layers must be"),
    (KIMI, nested(head_dim=0), "linear_head_dim must be"),
    (KIMI, dict(linear_num_heads=8), "linear_attn_config.num_heads and linear_num_heads differ"),
    (KIMI, dict(layer_types=[LINEAR] * 27), "linear_attn_config=.* contradicts layer_types"),
    (KIMI, dict(layer_types=["mamba"] * 27), "layer_types .* are not supported"),
    (KIMI, dict(mla_use_nope=False), "mla_use_nope must be True"),
    (KIMI, dict(moe_router_activation_func="softmax"), "moe_router_activation_func must be"),
    (KIMI, dict(num_nextn_predict_layers=1), "num_nextn_predict_layers must be 0"),
    (KIMI, dict(num_experts_per_token=300), "num_experts_per_token must be"),
    (KIMI, dict(num_experts="8"), "num_experts must be"),
    (KIMI, dict(mlp_layer_types=["sparse"] * 27), "first_k_dense_replace=1 contradicts"),
    (LING, dict(layer_types=[LINEAR] * 42), "layer_group_size=6 contradicts layer_types"),
    (LING, dict(layer_group_size=0), "layer_group_size must be"),
    (LING, dict(kda_lower_bound=1.0), "kda_lower_bound must be"),
    (LING, dict(kda_lower_bound=0.0), "kda_lower_bound must be below 0"),
    (LING, dict(short_conv_kernel_size=1), "short_conv_kernel_size must be"),
    (LING, dict(head_dim=1), "head_dim must be"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_errors_name_the_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read(name, **changes)


@pytest.mark.parametrize(("name", "attends"), [(KIMI, [3, 7, 11, 15, 19, 23, 26]),
                                              (LING, [5, 11, 17, 23, 29, 35, 41])])  # fmt: skip
def test_few_layers_attend(name: str, attends: list[int]) -> None:
    caches = [layer.cache for layer in read(name).layers]
    assert [i for i, cache in enumerate(caches) if isinstance(cache, Latent)] == attends
    assert {type(caches[i]) for i in range(len(caches)) if i not in attends} == {State}


def test_files_of_transformers_say_the_same_with_other_fields() -> None:
    plain = {n: v for n, v in PUBLISHED[KIMI].file.items() if n != "linear_attn_config"}
    kinds = [FULL if i + 1 in (4, 8, 12, 16, 20, 24, 27) else LINEAR for i in range(27)]
    again = ModelConfig.parse(plain | dict(layer_types=kinds, head_dim=64))
    assert again == read(KIMI)
    assert read(LING, head_dim=64, linear_head_dim=128) == read(LING)


def test_only_a_safe_gate_has_a_bound() -> None:
    assert read(LING).delta.lowest == -5.0
    assert read(LING, kda_safe_gate=False).delta.lowest is None
