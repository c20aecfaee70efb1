"""What the configs of dense families say, besides Llama's fields, and what is refused."""

import re
from typing import Any

import pytest
import torch
from families.dense import FULL, GROWING, SLIDING, YARN
from families.dense_published import PUBLISHED
from transformers import HunYuanDenseV1Config, Olmo3Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.layers.layer import Build
from nanovllm.layers.query_growth import GrowingQueries, QueryGrowth
from nanovllm.layers.ranks import ALONE
from nanovllm.layers.rotary_embedding import rope_frequencies
from nanovllm.models.config import ModelConfig
from nanovllm.models.ministral3 import build
from nanovllm.models.olmo3 import Olmo3Config as OurOlmo3Config

pytestmark = pytest.mark.usefixtures("one_thread")

HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
}  # fmt: skip


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.parse(PUBLISHED[name].file | changes)


def kinds(config: ModelConfig) -> list[tuple[int | None, bool]]:
    """The window of the first eight layers, and whether they rotate."""
    return list(zip(config.sliding_windows, config.rotated_layers, strict=True))[:8]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("EXAONE-4.0-1.2B", {}, [(None, True)] * 8),
        ("EXAONE-4.0-1.2B", dict(layer_types=None), [(None, True)] * 8),
        ("EXAONE-4.0-32B", {}, [*[(4096, True)] * 3, (None, False)] * 2),
        ("EXAONE-4.0-32B", dict(layer_types=None), [*[(4096, True)] * 3, (None, False)] * 2),
        (
            "EXAONE-4.0-32B",
            dict(layer_types=None, sliding_window_pattern=2),
            [(4096, True), (None, False)] * 4,
        ),
        ("Olmo-3-7B", {}, [*[(4096, True)] * 3, (None, True)] * 2),
        ("c4ai-command-r7b-12-2024", {}, [*[(4096, True)] * 3, (None, False)] * 2),
        ("c4ai-command-r-v01", {}, [(None, True)] * 8),
        ("Ministral-3-8B", dict(sliding_window=64), [(64, True)] * 8),
    ],
)
def test_which_layers_have_windows_and_rotate(
    name: str, changes: dict[str, Any], expected: list[tuple[int | None, bool]]
) -> None:
    assert kinds(read(name, **changes)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("EXAONE-4.0-32B", dict(sliding_window_pattern=2), "contradict sliding_window_pattern=2"),
        ("EXAONE-4.0-32B", dict(sliding_window_pattern="LG"), "contradict sliding_window_pattern"),
        ("EXAONE-4.0-32B", dict(sliding_window_pattern="LX"), "sliding_window_pattern must be"),
        ("EXAONE-4.0-32B", dict(sliding_window_pattern=0), "sliding_window_pattern must be"),
        ("EXAONE-4.0-1.2B", dict(layer_types=[SLIDING] * 30), "sliding_window is not set"),
        ("Olmo-3-7B", dict(sliding_window=None), "sliding_window is not set"),
        ("Olmo-3-7B", dict(layer_types=[FULL]), "layer_types has 1 entries"),
        ("Olmo-3-7B", dict(rope_theta=1e4), "rope_theta=10000.0 is for layers without a window"),
        ("Olmo-3-7B", dict(rope_parameters=YARN), "rope_parameters must have the parameters of"),
        ("Olmo-3-7B", dict(rope_parameters={FULL: YARN}), "rope_theta"),
        ("Olmo-3-7B", dict(num_hidden_layers=0), "num_hidden_layers must be"),
        ("granite-3.1-2b", dict(logits_scaling=0), "logits_scaling must be"),
        ("granite-3.1-2b", dict(residual_multiplier=-1.0), "residual_multiplier must be"),
        ("Seed-OSS-36B", dict(attention_out_bias=None), "attention_out_bias must be"),
        ("helium-1-2b", dict(head_dim=64), "hidden_size=2048 must be num_attention_heads=16 times"),
        ("nanochat-d32", dict(hidden_act="silu"), "hidden_act must be 'relu2'"),
        ("nanochat-d32", dict(final_logit_softcapping=0), "final_logit_softcapping must be"),
        ("c4ai-command-r-v01", dict(logit_scale=None), "logit_scale must be"),
        ("c4ai-command-r-v01", dict(layer_types=[SLIDING] * 40), "layer_types"),
        (
            "GLM-4-9B-0414",
            dict(partial_rotary_factor=0.26),
            "partial_rotary_factor=0.26 of head_dim",
        ),
        ("Ministral-3-8B", dict(rope_scaling={**GROWING, "llama_4_scaling_beta": 1}), "differ"),
        (
            "Ministral-3-8B",
            dict(rope_parameters={**GROWING, "max_position_embeddings": 5}),
            "max_position_embeddings=262144 and 5 of the rope differ",
        ),
        (
            "Ministral-3-8B",
            dict(rope_parameters={**GROWING, "llama_4_scaling_beta": -1}),
            "llama_4_scaling_beta must be",
        ),
    ],
)
def test_contradictions_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(name, **changes)


@pytest.mark.parametrize("name", ["Olmo-3-7B", "Olmo-3-32B"])
def test_only_layers_without_a_window_have_the_scaled_rope(name: str) -> None:
    config, theirs = read(name), Olmo3Config(**PUBLISHED[name].file)
    assert isinstance(config, OurOlmo3Config)
    for kind, own in ((FULL, config.rope_parameters), (SLIDING, config.sliding_rope_parameters)):
        assert own == theirs.rope_parameters[kind]
    assert read(name, rope_scaling=None, rope_parameters=theirs.rope_parameters) == config


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_alpha_raises_the_theta(spelling: str) -> None:
    """As the published HunYuan models have it."""
    rope = dict(alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, type="dynamic")
    config = ModelConfig.parse({**HUNYUAN, "rope_theta": 5000.0, spelling: rope})
    theirs = HunYuanDenseV1Config(**HUNYUAN, rope_theta=5000.0, rope_scaling=rope)
    own, factor = rope_frequencies(16, 64, 2048, config.rope_parameters)
    torch.testing.assert_close(own, HunYuanDenseV1RotaryEmbedding(theirs).inv_freq)
    assert factor == 1.0 and config.max_context == 2048
    for bad in (dict(rope, rope_theta=1e4), dict(rope, alpha=-1.0)):
        with pytest.raises(ValueError, match=r"rope_theta=5000.0 and 10000.0|alpha must be"):
            ModelConfig.parse({**HUNYUAN, "rope_theta": 5000.0, spelling: bad})


def test_defaults_that_are_not_fields_of_a_config_class() -> None:
    """Half of GLM's heads are rotated, and three ids end its texts; Ministral's rope is scaled."""
    left_out = {"partial_rotary_factor", "eos_token_id"}
    file = {n: v for n, v in PUBLISHED["GLM-4-9B-0414"].file.items() if n not in left_out}
    config = ModelConfig.parse(file)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.eos_token_ids == {151_329, 151_336, 151_338}
    bare = read("Ministral-3-8B", rope_parameters=None)
    assert bare == read("Ministral-3-8B")


@pytest.mark.parametrize(("max_positions", "grows"), [(50, False), (51, True)])
def test_queries_grow_only_past_the_trained_length(max_positions: int, grows: bool) -> None:
    """Within it, all factors are 1: the fastest kernels compute the usual model."""
    config = read(
        "Ministral-3-3B", hidden_size=32, num_hidden_layers=1, vocab_size=9, intermediate_size=8,
        rope_parameters=GROWING,
    )  # fmt: skip
    model = build(config, Build(ALONE, PLAIN_FORMATS, max_positions))  # type: ignore[arg-type]
    assert isinstance(model.mixers[0], GrowingQueries) is grows
    assert ("growth" in model.model.ropes) is grows


def test_queries_grow_by_steps_of_the_trained_length() -> None:
    factors, _ = QueryGrowth(0.5, 10, 40)(torch.tensor([0, 9, 10, 19, 20, 39]))
    steps = torch.tensor([0, 0, 1, 1, 2, 3])
    torch.testing.assert_close(factors.flatten(), 1 + 0.5 * torch.log(1.0 + steps))
