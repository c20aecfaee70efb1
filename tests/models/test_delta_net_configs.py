"""Configs of models with gated delta nets: what is refused, and fields that may be absent."""

import copy
from typing import Any

import pytest
from families.hybrids import PUBLISHED

from nanovllm.layers.cache_spec import KeysAndValues, State
from nanovllm.models.config import ModelConfig

NEXT, OLMO = "Qwen3-Next-80B-A3B", "OLMo Hybrid 7B"
LINEAR = "linear_attention"


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.parse({**copy.deepcopy(PUBLISHED[name].file), **changes})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (NEXT, dict(linear_num_value_heads=24), "linear_num_value_heads=24 is not a multiple of"),
    (NEXT, dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be"),
    (NEXT, dict(linear_key_head_dim=0), "linear_key_head_dim must be"),
    (NEXT, dict(layer_types=[LINEAR]), "layer_types has 1 entries, num_hidden_layers=48"),
    (NEXT, dict(layer_types=["mamba"] * 48), "layer_types .* are not supported"),
    (NEXT, dict(full_attention_interval=0), "full_attention_interval must be"),
    (
        NEXT, dict(full_attention_interval=2, layer_types=([LINEAR] * 3 + ["full_attention"]) * 12),
        "full_attention_interval=2 contradicts layer_types",
    ),
    (NEXT, dict(attn_output_gate=False), "attn_output_gate must be true, got False"),
    (NEXT, dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
    (OLMO, dict(linear_num_value_heads=7), "linear_num_value_heads=7 is not a multiple of"),
    (OLMO, dict(linear_key_head_dim="a"), "linear_key_head_dim must be"),
    (OLMO, dict(rope_parameters=[1]), "rope_parameters must be an object"),
    (OLMO, dict(linear_allow_neg_eigval="yes"), "linear_allow_neg_eigval must be"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_errors_name_the_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read(name, **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_fourth_layer_attends(name: str) -> None:
    """With `layer_types` in the file or without."""
    kinds = [layer.cache for layer in read(name).layers]
    assert {type(cache) for cache in kinds[3::4]} == {KeysAndValues}
    del kinds[3::4]
    assert {type(cache) for cache in kinds} == {State}


def test_olmo_has_its_own_interval() -> None:
    assert read(OLMO, full_attention_interval=2) == read(OLMO)
    twice = read(NEXT, full_attention_interval=2)
    assert twice != read(NEXT)
    assert (
        read(NEXT, full_attention_interval=2, layer_types=[LINEAR, "full_attention"] * 24) == twice
    )
