"""The text models of Gemma 3n and 4: what their files may have, and what is refused."""

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SAMPLES
from families.describe import write
from reference import make_llm
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.bench.roofline import decode_kv_bytes, kv_bytes_per_token
from nanovllm.engine.start import warm_up
from nanovllm.layers.shared_kv import LendingAttention, SharedKVAttention
from nanovllm.layers.sparse_gelu import SparseGeluAndMul
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

FULL, SLIDING = "full_attention", "sliding_attention"
PROMPTS = [[7, 3, 200, 9, 41] * n for n in (1, 3, 12)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The samples that share keys."""
    folder = tmp_path_factory.mktemp("gemma")
    names = ("Gemma 3n", "Gemma 4 shared", "Gemma 4 whole")
    return {name: write(folder / name, SAMPLES[name]) for name in names}


def tokens(path: Path, **options: Any) -> list[list[int]]:
    with make_llm(path, **options) as llm:
        return [out.token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def fields(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw


def rewritten(path: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor], to: Path) -> Path:
    """A copy of a checkpoint with other fields and tensors."""
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_text((path / name).read_text())
    (to / "config.json").write_text(json.dumps(raw))
    save_file(tensors, to / "model.safetensors")
    return to


def test_what_text_does_not_use_is_left_out_and_logged(
    paths: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published files have towers, and projections of layers that share another layer's keys."""
    path = paths["Gemma 4 whole"]
    tensors = load_file(path / "model.safetensors")
    unused = [
        f"model.{name}.weight" for name in ("vision_tower.a", "audio_tower", "embed_vision.b")
    ]
    attention = "model.language_model.layers.5.self_attn"
    unused += [f"{attention}.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    added = tensors | {name: torch.ones(3, 5) for name in unused}
    other = rewritten(path, fields(path), added, tmp_path / "other")
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert tokens(other) == tokens(path)
    assert "6 tensors of" in caplog.text and "are left out" in caplog.text


def test_tensors_of_layers_with_keys_are_not_left_out(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = paths["Gemma 4 shared"]
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_norm.weight"]
    other = rewritten(path, fields(path), tensors, tmp_path / "other")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn\.k_norm\.weight"):
        make_llm(other)


def test_the_text_of_whole_gemma_3n_is_that_of_its_text_model(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """transformers makes no whole model here: its vision tower needs another package."""
    path = paths["Gemma 3n"]
    text = fields(path)
    whole = dict(
        architectures=["Gemma3nForConditionalGeneration"], text_config=text, dtype="float32",
        model_type="gemma3n",
    )  # fmt: skip
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.vision_tower.x"] = torch.ones(2)
    assert tokens(rewritten(path, whole, tensors, tmp_path / "whole")) == tokens(path)


def test_old_files_of_gemma_3n_have_a_frequency_for_each_type_of_layers(
    paths: dict[str, Path],
) -> None:
    raw = fields(paths["Gemma 3n"])
    new = ModelConfig.parse(raw)
    del raw["rope_parameters"]
    old = raw | dict(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None)
    assert ModelConfig.parse(old).ropes == new.ropes  # type: ignore[attr-defined]
    other = ModelConfig.parse(old | dict(rope_local_base_freq=5e3)).ropes  # type: ignore[attr-defined]
    assert (other[SLIDING]["rope_theta"], other[FULL]["rope_theta"]) == (5e3, 1e6)


def test_gemma_3n_drafts_for_itself(paths: dict[str, Path]) -> None:
    """The draft steps read the second embedding of tokens that only the device knows."""
    path = paths["Gemma 3n"]
    drafts = dict(method="draft_model", model=str(path), num_speculative_tokens=3)
    assert tokens(path, speculative_config=drafts) == tokens(path)


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4 shared"])
def test_two_layers_of_each_kind_have_the_keys_that_they_share(
    name: str, paths: dict[str, Path]
) -> None:
    """Else the warm-up would run a layer without the layer whose keys it reads."""
    config = ModelConfig.from_dir(paths[name])
    with torch.device("meta"):
        model = build_model(config, 16)
    with warm_up._two_layers_of_each_kind(model):
        seen: list[LendingAttention] = []
        for module in model.model.layers.modules():
            if isinstance(module, LendingAttention):
                seen.append(module)
            if isinstance(module, SharedKVAttention):
                assert module._lenders[0] in seen


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4 shared"])
def test_layers_that_share_keys_compute_only_the_tokens_that_are_asked_for(
    name: str, paths: dict[str, Path]
) -> None:
    """Of a prompt in two chunks: none, then the last one; or all, for their log-probabilities."""
    sharing: list[int] = []
    others: list[int] = []
    with make_llm(paths[name], max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        model = llm.model_runner.shard.model
        for layer in model.model.layers:
            seen = sharing if isinstance(layer.parts.mixer, SharedKVAttention) else others
            layer.parts.feed_forward.register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(len(args[0]))
            )
        for params, expected in (
            (SamplingParams(max_tokens=1), {1}),
            (SamplingParams(max_tokens=1, prompt_logprobs=1), {16, 9}),
        ):
            sharing.clear(), others.clear()
            llm.generate([[*range(50, 75)]], params, use_tqdm=False)
            assert set(sharing) == expected and set(others) == {16, 9}
        lenders = [m for m in model.modules() if isinstance(m, LendingAttention)]
        assert lenders and all(lender._lent is None for lender in lenders)


def test_memory_counts_only_layers_that_keep_keys(paths: dict[str, Path]) -> None:
    """Three of six layers; a decode step with 4 keys reads those of all, of 16 and 32 numbers."""
    config = ModelConfig.from_dir(paths["Gemma 4 shared"])

    def head_bytes(size: int) -> int:
        return 4 * size

    assert kv_bytes_per_token(config, head_bytes) == 2 * 4 * (16 + 32 + 16)
    assert decode_kv_bytes(config, head_bytes, [3], [2]) == 2 * 4 * 4 * 3 * (16 + 32)


def test_sparse_gates_keep_the_share_that_is_asked_for() -> None:
    """Of normal gates; up is 1, so that an output is 0 where the gate was cut."""
    torch.manual_seed(0)
    gate = torch.randn(2, 20_000) * torch.tensor([[3.0], [0.1]]) + 5
    out = SparseGeluAndMul(0.9, 20_000)(torch.cat([gate, torch.ones_like(gate)], 1))
    assert ((out == 0).float().mean(1) - 0.9).abs().max() < 0.01


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "later tokens": ("Gemma 4 shared", dict(use_bidirectional_attention="all"), "later tokens"),
    "rope type": (
        "Gemma 4 shared",
        dict(rope_parameters={FULL: dict(rope_type="yarn"), SLIDING: dict(rope_theta=1e4)}),
        "rope_parameters of full_attention: rope_type 'yarn' is not supported",
    ),
    "no rope": ("Gemma 4 shared", dict(rope_parameters={FULL: {}}), "rope_parameters must have"),
    "no theta": (
        "Gemma 4 shared",
        dict(rope_parameters={FULL: {}, SLIDING: {}}),
        "rope_theta is missing",
    ),
    "still rope": (
        "Gemma 4 shared",
        dict(rope_parameters={
            FULL: dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.01),
            SLIDING: dict(rope_theta=1e4),
        }),
        "rotates nothing",
    ),
    "all share": ("Gemma 4 shared", dict(num_kv_shared_layers=6), "num_kv_shared_layers must be"),
    "nothing to share": (
        "Gemma 4 shared", dict(num_kv_shared_layers=5), "num_kv_shared_layers=5: no layer before",
    ),
    "small table": (
        "Gemma 4 shared", dict(vocab_size_per_layer_input=7), "vocab_size_per_layer_input=7 is",
    ),
    "no experts": ("Gemma 4 shared", dict(enable_moe_block=True), "num_experts must be an int"),
    "other heads": (
        "Gemma 4 shared",
        dict(per_layer_config={"1": dict(head_dim=32)}),
        "per_layer_config: layers of full_attention must have equal heads",
    ),
    "other fields of layers": (
        "Gemma 4 shared",
        dict(per_layer_config={"1": dict(hidden_size=32)}),
        "only num_key_value_heads, head_dim may differ",
    ),
    "layer types": ("Gemma 4 shared", dict(layer_types=["chunked"] * 6), "layer_types"),
    "activation": ("Gemma 3n", dict(hidden_activation="silu"), "hidden_activation must be"),
    "sparsity": (
        "Gemma 3n", dict(activation_sparsity_pattern=[0.5]), "sparsity_pattern must have",
    ),
    "no second embedding": (
        "Gemma 3n", dict(hidden_size_per_layer_input=0), "hidden_size_per_layer_input must be",
    ),
    "active stream": ("Gemma 3n", dict(altup_active_idx=3), "altup_active_idx must be"),
    "rope scaling": ("Gemma 3n", dict(rope_scaling=dict(factor=2.0)), "rope_scaling must be null"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, paths: dict[str, Path]) -> None:
    name, changed, says = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=says):
        ModelConfig.parse(fields(paths[name]) | changed)


VALUES: list[Any] = [
    None, "x", 5, 2.5, True, -1, 0, 10**30, math.nan, math.inf, [1], [], [[1]], {"a": 1}, {},
]  # fmt: skip


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4 shared"])
def test_no_value_of_a_field_breaks_the_reader(name: str, paths: dict[str, Path]) -> None:
    """It is read, or a ValueError or TypeError says why not."""
    raw = fields(paths[name])
    for field in [*raw, "per_layer_config", "global_head_dim", "rope_local_base_freq"]:
        for value in VALUES:
            with contextlib.suppress(ValueError, TypeError):
                ModelConfig.parse(raw | {field: value})


def test_text_of_whole_files_may_not_read_later_tokens(paths: dict[str, Path]) -> None:
    raw = fields(paths["Gemma 4 whole"])
    assert raw["text_config"]["use_bidirectional_attention"] == "vision"
    raw["text_config"]["use_bidirectional_attention"] = "all"
    with pytest.raises(ValueError, match="use_bidirectional_attention must be null or 'vision'"):
        ModelConfig.parse(raw)
