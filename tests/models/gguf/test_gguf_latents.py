"""GGUF files of models with latent attention: logits and tokens of the models they are made of."""

from pathlib import Path
from typing import Any

import pytest
from conftest import edit_config
from converted_files import File, check_outputs, output, write_file

from nanovllm import LLM
from nanovllm.kernels.operands.routing import ExpertGroups
from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.gguf.file import GGUFFile

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

# Rows of 32 weights or more, which blocks need.
WIDE = dict(kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=32, v_head_dim=16)
PLAIN = dict(WIDE, q_lora_rank=None)
LIKE_4B = dict(WIDE, scale_emb=12, scale_depth=1.4, dim_model_base=256)
UNBIASED = dict(attention_bias=False, rope_interleave=True)
FILES = [
    File("deepseek2", "DeepSeek-V3", WIDE),
    File("deepseek2", "DeepSeek-V3, plain queries, yarn, with biases", PLAIN | UNBIASED
         | dict(hidden_size=64, rope_parameters=dict(
             rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64,
             beta_fast=32, beta_slow=1, mscale=0.7, mscale_all_dim=0.7))),
    File("deepseek2", "DeepSeek-V2, plain queries, greedy", PLAIN),
    File("deepseek2", "Youtu", WIDE),
    File("minicpm3", "MiniCPM3", LIKE_4B),
]  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.sample} {len(file.fields)}")
def test_files_have_the_models_outputs(file: File, tmp_path: Path) -> None:
    check_outputs(file, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.head_count_kv": 2}, {"attention.key_length": 100},
        {"expert_gating_func": 3}, {"attention.value_length": 3}, {"attention.scale": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_file(FILES[0].write_model(tmp_path), "deepseek2", **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(path), device="cpu")


def config_of(path: Path) -> Any:
    return ModelConfig.from_dir(gguf_directory(path))


@pytest.mark.parametrize(("experts", "groups"), [(256, ExpertGroups(8, 4, best=2)), (64, None)])
def test_files_of_v3_may_leave_out_the_groups(
    experts: int, groups: ExpertGroups | None, tmp_path: Path
) -> None:
    """Sigmoids of 256 experts are those of V3; Moonlight has 64, in one group."""
    few = dict(num_hidden_layers=2, moe_intermediate_size=8, n_group=1, topk_group=1)
    file = File("deepseek2", "DeepSeek-V3", WIDE | few | dict(n_routed_experts=experts))
    left_out = dict(expert_group_count=None, expert_group_used_count=None)
    path = write_file(file.write_model(tmp_path), "deepseek2", **left_out)
    assert config_of(path).experts.routing.groups == groups


def test_a_multiplier_of_zero_is_as_absent(tmp_path: Path) -> None:
    """Converters write a tenth of `mscale_all_dim`, which may be 0."""
    model, key = FILES[1].write_model(tmp_path), "rope.scaling.yarn_log_multiplier"
    zero, none = (config_of(write_file(model, "deepseek2", **{key: v})) for v in (0.0, None))
    assert zero == none and "mscale" not in zero.rope_parameters


def test_keys_and_values_may_be_in_different_parts(tmp_path: Path) -> None:
    """Each tensor has a file of its own. A file that lacks the values is an error."""
    model = FILES[2].write_model(tmp_path)
    tokens, _ = output(model)
    found, _ = output(path := write_file(model, "deepseek2", num_tensors=1))
    assert found == tokens
    (values,) = (each for each in path.parent.glob("*-of-*.gguf") if holds(each, "0.attn_v_b"))
    values.write_bytes(values.read_bytes().replace(b"blk.0.attn_v_b", b"blk.9.attn_v_b"))
    with pytest.raises(ValueError, match=r"needs 'blk\.0\.attn_v_b\.weight', which"):
        output(path)


def holds(path: Path, name: str) -> bool:
    return any(name in tensor for tensor in GGUFFile(path).tensors)


def test_old_files_have_keys_and_values_together(tmp_path: Path) -> None:
    """They describe the heads as if there were no latent rows."""
    model = FILES[0].write_model(tmp_path)
    tokens, _ = output(model)
    edit_config(model, is_old_file=True)
    for kind in ("F32", "Q8_0"):
        found, _ = output(write_file(model, "deepseek2", kind))
        assert kind != "F32" or found == tokens
