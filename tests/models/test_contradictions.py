"""Files that contradict their config, or themselves: refused with both named, or as transformers.

What transformers reads without a contradiction is compared with it: logits and greedy tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import edit_config, make_model
from reference import Case, check_logits, make_case, make_llm, make_prompts
from safetensors.torch import load_file, save_file

from nanovllm.models.checkpoint import INDEX
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

NEEDS_5 = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 reads it otherwise, or not at all"
)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def store(path: Path, tensors: dict[str, torch.Tensor], *files: list[str]) -> None:
    """Store a checkpoint's tensors in one file, or those named in `files` in files of their own."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    rest = {n: t for n, t in tensors.items() if not any(n in names for names in files)}
    parts = [{name: tensors[name] for name in names} for names in files]
    weight_map: dict[str, str] = {}
    for index, part in enumerate([*parts, rest]):
        file = f"part{index}.safetensors" if files else "model.safetensors"
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if files:
        (path / "model.safetensors").unlink()
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(path: Path) -> CausalLM:
    model = build_model(ModelConfig.from_dir(path), max_positions=16)
    with torch.no_grad():
        load_model(model, path)
    return model


def change(path: Path, **fields: Any) -> None:
    """Set fields of `config.json`, also to null."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))


# A tied head

ORDERS: dict[str, list[list[str]]] = {
    "one file": [],
    "the head first": [[HEAD], [EMBED]],
    "the embedding first": [[EMBED], [HEAD]],
}


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = make_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    assert HEAD not in tensors
    return path, tensors


@pytest.mark.parametrize("order", ORDERS)
def test_a_tied_head_with_other_values_is_refused(
    tied: tuple[Path, dict[str, torch.Tensor]], order: str
) -> None:
    """transformers does not tie them then, and warns: the config says one thing, the files two."""
    path, tensors = tied
    tensors[HEAD] = tensors[EMBED].clone()
    tensors[HEAD][200, 3] += 1
    store(path, tensors, *ORDERS[order])
    with pytest.raises(ValueError, match="tie_word_embeddings") as caught:
        load(path)
    for says in (HEAD, EMBED, str(path), "config.json"):
        assert says in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_tied_head_with_equal_values_loads(
    tied: tuple[Path, dict[str, torch.Tensor]], order: str, stored: torch.dtype
) -> None:
    path, tensors = tied
    tensors[EMBED] = tensors[EMBED].bfloat16().float()
    tensors[HEAD] = tensors[EMBED].to(stored)
    store(path, tensors, *ORDERS[order])
    model = load(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBED])


def test_a_tied_head_of_another_shape_is_refused(
    tied: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = tied
    store(path, tensors | {HEAD: tensors[EMBED][:-1]})
    with pytest.raises(ValueError, match=r"lm_head.weight' has shape \(258, 64\)"):
        load(path)


def test_a_tied_tensor_in_two_files_is_refused(tied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = tied
    store(path, tensors, [EMBED])
    (path / INDEX).unlink()
    save_file({EMBED: tensors[EMBED]}, path / "part2.safetensors")
    with pytest.raises(ValueError, match="in two files"):
        load(path)


def test_a_tied_model_with_neither_name_is_refused(
    tied: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = tied
    del tensors[EMBED]
    store(path, tensors)
    with pytest.raises(ValueError, match=f"the files lack {EMBED}"):
        load(path)


@NEEDS_5
def test_a_tied_model_with_only_the_head_equals_transformers(
    tied: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """Its table is under the other name."""
    path, tensors = tied
    expected = tensors[EMBED]
    tensors[HEAD] = tensors.pop(EMBED)
    store(path, tensors)
    assert torch.equal(load(path).model.embed_tokens.weight, expected)
    check_logits(make_case(path, make_prompts()))


@pytest.mark.slow
@pytest.mark.parametrize("row", [3, 250])
def test_each_rank_compares_its_part_of_a_tied_head(
    tied: tuple[Path, dict[str, torch.Tensor]], row: int
) -> None:
    path, tensors = tied
    tensors[HEAD] = tensors[EMBED].clone()
    store(path, tensors)
    with make_llm(path, tensor_parallel_size=2):
        pass
    tensors[HEAD][row, 3] += 1
    store(path, tensors)
    with pytest.raises((ValueError, RuntimeError), match="tie_word_embeddings"):
        make_llm(path, tensor_parallel_size=2)


# Types of weights


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", EMBED])
def test_weights_that_are_no_floats_are_refused(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Quantized ones are meaningless without their scales, which this model does not read."""
    path = make_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    store(path, tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(ValueError, match=name) as caught:
        load(path)
    for says in ("type", "F32, F16, BF16", str(path)):
        assert says in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_every_width_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_model(tmp_path)
    tensors = {n: t.to(dtype) for n, t in load_file(path / "model.safetensors").items()}
    store(path, tensors)
    model = load(path)
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBED].float())


# Rope in two spellings

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
SPELT: dict[str, Any] = {
    "rope_theta": None, "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            dict(
                rope_scaling={"type": "linear", "factor": 2.0},
                rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            ),
            ["rope_scaling", "rope_parameters", "2.0", "4.0"],
        ),
        (
            dict(
                rope_scaling={"type": "yarn", **YARN},
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            ["rope_scaling", "rope_parameters"],
        ),
        (  # transformers would take the theta of rope_scaling, which is the default
            dict(
                rope_scaling={"type": "yarn", **YARN},
                rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN},
            ),
            ["rope_scaling", "rope_parameters"],
        ),
        (
            dict(rope_theta=1e5, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            ["rope_theta=100000.0", "1000000.0 in rope_parameters"],
        ),
        (
            dict(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            ["rope_theta=10000.0", "1000000.0 in rope_parameters"],
        ),
        (
            dict(rope_theta=1e5, rope_scaling={"type": "yarn", "rope_theta": 1e6, **YARN}),
            ["rope_theta=100000.0", "1000000.0 in rope_scaling"],
        ),
        (
            dict(rope_parameters={"rope_type": "yarn", "type": "linear", **YARN}),
            ["rope_type", "'yarn'", "'linear'"],
        ),
    ],
)
def test_two_spellings_of_rope_that_differ_are_refused(
    model_dir: Path, tmp_path: Path, fields: dict[str, Any], says: list[str]
) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    change(tmp_path, **SPELT | fields)
    if "rope_theta" not in fields:
        edit_config(tmp_path)  # removes nulls
    with pytest.raises(ValueError, match="differ") as caught:
        ModelConfig.from_dir(tmp_path)
    assert [text for text in says if text not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=1e6, rope_scaling={"type": "yarn", **YARN},
             rope_parameters={"rope_type": "yarn", "rope_theta": 1000000, **YARN}),
        dict(rope_scaling={"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, **YARN},
             rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "beta_fast": None, **YARN}),
        dict(rope_theta=1e6, rope_scaling={},
             rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN}),
        dict(rope_theta=1e6, rope_scaling={"type": "yarn", **YARN}, rope_parameters={}),
        dict(rope_theta=1e6, rope_scaling={"type": "yarn", **YARN}),
    ],
)  # fmt: skip
def test_two_spellings_of_rope_that_agree_are_read(
    model_dir: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    edit_config(tmp_path, **SPELT | fields)
    expected = {"rope_type": "yarn", "rope_theta": 1e6, **YARN}
    assert ModelConfig.from_dir(tmp_path).rope_parameters == expected


def test_phis_two_names_of_longrope_agree(model_dir: Path, tmp_path: Path) -> None:
    """transformers 5 writes both into one file."""
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    longrope = {"type": "su", "rope_type": "longrope", "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8, "rope_theta": 1e4}  # fmt: skip
    change(tmp_path, architectures=["Phi3ForCausalLM"], rope_parameters=longrope)
    assert ModelConfig.from_dir(tmp_path).rope_parameters["rope_type"] == "longrope"


@pytest.fixture(scope="module")
def yarn_of_null(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Its factor is 512 / 128, by the lengths in the config."""
    path = make_model(tmp_path_factory.mktemp("yarn"), seed=1, rope_theta=1e5)
    yarn = {"rope_type": "yarn", "rope_theta": 1e5, **YARN, "factor": None}
    change(path, rope_parameters=yarn)
    return make_case(path, make_prompts())


@NEEDS_5
def test_yarn_with_a_factor_of_null_equals_transformers(yarn_of_null: Case) -> None:
    assert ModelConfig.from_dir(yarn_of_null.path).rope_parameters["factor"] == 4.0
    check_logits(yarn_of_null)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3"])
def test_other_types_need_a_factor_that_is_not_null(tmp_path: Path, rope_type: str) -> None:
    """transformers divides by it."""
    path = make_model(tmp_path)
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    change(path, rope_parameters={"rope_type": rope_type, "factor": None, **bounds})
    with pytest.raises(ValueError, match=f"'{rope_type}' needs a factor"):
        ModelConfig.from_dir(path)


# Windows

EVERY_OTHER = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)


def windowed(path: Path, family: str, **fields: Any) -> Path:
    """A model of three layers with a window of 20, if its architecture knows windows."""
    model = make_model(
        path, family=family, seed=2, num_hidden_layers=3, sliding_window=20,
        use_sliding_window=True, **MOE if family == "Qwen3Moe" else {},
    )  # fmt: skip
    change(model, sliding_window=20, **fields)
    return model


@NEEDS_5
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral", "SmolLM3"])
def test_layer_types_are_read_as_by_transformers(tmp_path: Path, family: str) -> None:
    """As AutoModel does in version 5, for which Mistral with layer_types is Ministral."""
    path = windowed(tmp_path, family, layer_types=EVERY_OTHER, max_window_layers=1)
    assert ModelConfig.from_dir(path).sliding_windows == (20, None, 20)
    check_logits(make_case(path, make_prompts()))


@pytest.mark.parametrize("family", ["Qwen3Moe", "Phi3", "Mistral"])
def test_layer_types_that_repeat_what_the_architecture_does_are_read(
    tmp_path: Path, family: str
) -> None:
    path = windowed(tmp_path, family, layer_types=["sliding_attention"] * 3)
    assert ModelConfig.from_dir(path).sliding_windows == (20, 20, 20)
    check_logits(make_case(path, make_prompts()))


def test_llamas_layer_types_without_windows_are_read(tmp_path: Path) -> None:
    path = windowed(tmp_path, "Llama", layer_types=["full_attention"] * 3)
    assert ModelConfig.from_dir(path).sliding_windows == (None, None, None)
    check_logits(make_case(path, make_prompts()))


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("Qwen3Moe", EVERY_OTHER), ("Phi3", EVERY_OTHER), ("Llama", EVERY_OTHER),
        ("Qwen3Moe", ["full_attention"] * 3), ("Llama", ["full_attention"]), ("Phi3", []),
    ],
)  # fmt: skip
def test_layer_types_that_an_architecture_does_not_read_are_refused(
    tmp_path: Path, family: str, kinds: list[str]
) -> None:
    """transformers' layers ignore them, and its KV cache does not."""
    path = windowed(tmp_path, family, layer_types=kinds)
    with pytest.raises(ValueError, match=f"layer_types .* contradict .* {family}ForCausalLM"):
        ModelConfig.from_dir(path)


@NEEDS_5
def test_smollm3_without_layer_types_has_windows_where_nothing_rotates(tmp_path: Path) -> None:
    """If `use_sliding_window` says so."""
    path = make_model(
        tmp_path, family="SmolLM3", seed=2, num_hidden_layers=3, sliding_window=20,
        use_sliding_window=True, no_rope_layers=[1, 0, 1],
    )  # fmt: skip
    edit_config(path, layer_types=None)
    assert ModelConfig.from_dir(path).sliding_windows == (None, 20, None)
    check_logits(make_case(path, make_prompts()))
