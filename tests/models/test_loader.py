"""The loader fills every parameter once from the right tensor, and names what is bad."""

import io
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHAPE, edit_config, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from waiting import LIMIT, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.formats.dummy_values import dummy_values
from nanovllm.models import family as families
from nanovllm.models import loader
from nanovllm.models.checkpoint import INDEX, resolve_model, weight_files
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.dummy import load_dummy
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, decoder_fields
from nanovllm.models.loader import NUM_THREADS, InFile, load_model
from nanovllm.models.outside import register_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER = "model.layers.1."
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS = 4
MOE: dict[str, Any] = dict(
    family="Qwen3Moe", num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=32
)
Copy = Callable[[], Path]


def build(path: Path, dtype: torch.dtype | None = torch.float32) -> CausalLM:
    """The model of `path` without its weights, every value NaN."""
    model = build_model(ModelConfig.from_dir(path), max_positions=16).to(dtype=dtype)
    for param in model.parameters():
        param.data.fill_(torch.nan)
    return model


def load(path: Path, dtype: torch.dtype | None = torch.float32) -> CausalLM:
    model = build(path, dtype)
    with torch.no_grad():
        load_model(model, path)
    return model


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as safetensors reads them."""
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def rewrite(path: Path, **changes: torch.Tensor | None) -> Path:
    """Change a single-file checkpoint: names with `__` for the dots; None deletes a tensor."""
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    merged: dict[str, Any] = {**tensors(path), **renamed}
    save_file({k: v for k, v in merged.items() if v is not None}, path / "model.safetensors")
    return path


def assert_filled(model: CausalLM, files: dict[str, torch.Tensor]) -> None:
    """Every parameter equals the file's tensor, or its parts joined along the first axis."""
    used = set()
    for name, param in model.named_parameters():
        names = [name]
        if name not in files:
            for fused, parts in PARTS.items():
                names = [n.replace(fused, part) for n in names
                         for part in (parts if fused in n else [fused])]  # fmt: skip
            if ".experts." in name:
                names = [n.replace("experts.", f"experts.{i}.") + ".weight"
                         for i in range(EXPERTS) for n in names]  # fmt: skip
        whole = torch.cat([files[n] for n in names])
        assert torch.equal(param, whole.view(param.shape).to(param.dtype)), name
        used |= set(names)
    assert used == set(files)


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **dict(device="cpu", num_kvcache_blocks=8) | options)


# What must load


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_attention_heads": 6, "head_dim": 10, "num_key_value_heads": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 263},
        {"family": "Llama", "attention_bias": True, "mlp_bias": True},
        {"family": "Mistral"},
        {"family": "Qwen2"},
        {"family": "Phi3", "num_key_value_heads": 1},
        MOE,
        {**MOE, "decoder_sparse_step": 2},
    ],
    ids=str,
)
def test_every_parameter_gets_its_tensors(
    tmp_path: Path, shape: dict[str, Any], shards: bool
) -> None:
    """The parts of fused weights in order, the biases, all shards."""
    path = make_model(tmp_path, shards=shards, **shape)
    assert (path / INDEX).exists() == shards
    assert (len(weight_files(path)) > 3) == shards
    model = load(path)
    assert_filled(model, tensors(path))
    tied = shape.get("tie_word_embeddings", False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_fused_tensors_are_taken_apart(copy_of_model: Copy) -> None:
    """Queries, keys and values in one tensor, but gate and up in two."""
    path = copy_of_model()
    files = tensors(path)
    expected = load(path)
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn."
        parts = [files.pop(f"{stem}{part}.weight") for part in PARTS["qkv_proj"]]
        files[f"{stem}qkv_proj.weight"] = torch.cat(parts)
    save_file(files, path / "model.safetensors")
    for param, other in zip(load(path).parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, other)


def test_fused_experts_are_taken_apart(tmp_path: Path) -> None:
    """As transformers 5 holds them in memory, and writes them if asked to."""
    path = make_model(tmp_path, **MOE)
    expected, files = load(path), tensors(path)
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([files.pop(f"{stem}{i}.{part}_proj.weight") for i in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        files |= {f"{stem}gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}down_proj": down}
    save_file(files, path / "model.safetensors")
    for param, other in zip(load(path).parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, other)


def test_the_router_stays_in_float32(tmp_path: Path) -> None:
    """In bfloat16, rounding would choose between experts with close scores."""
    path = make_model(tmp_path, **MOE)
    torch.set_default_dtype(torch.float16)  # as the runner does
    try:
        params = dict(load(path, None).named_parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    gates = [name for name, param in params.items() if param.dtype == torch.float32]
    assert gates == [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]
    assert torch.equal(params[gates[0]], tensors(path)[gates[0]])


def test_without_an_index_all_files_are_read(copy_of_model: Copy) -> None:
    """Several files and no index, as exporters write them."""
    path = copy_of_model()
    files = tensors(path)
    (path / "model.safetensors").unlink()
    for part in range(3):
        names = sorted(files)[part::3]
        save_file({name: files[name] for name in names}, path / f"part{part}.safetensors")
    assert_filled(load(path), files)


def test_a_tied_checkpoint_may_have_a_head(tmp_path: Path) -> None:
    """Some exporters write the tied head, others do not."""
    path = make_model(tmp_path, tie_word_embeddings=True)
    expected = load(path).model.embed_tokens.weight
    assert expected is not None
    head = tensors(path)["model.embed_tokens.weight"].clone()
    model = load(rewrite(path, lm_head__weight=head))
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert model.lm_head.weight is not None
    assert torch.equal(model.lm_head.weight, expected)


def test_a_tied_pair_may_be_in_two_files(tmp_path: Path) -> None:
    """In either order, and with equal values."""
    path = make_model(tmp_path, tie_word_embeddings=True)
    files = tensors(path)
    (path / "model.safetensors").unlink()
    names = ("lm_head.weight", "model.embed_tokens.weight")
    embedding = files.pop(names[1])
    save_file(files, path / "c.safetensors")
    for first, second in (names, names[::-1]):
        save_file({first: embedding}, path / "a.safetensors")
        save_file({second: embedding}, path / "b.safetensors")
        filled = load(path).lm_head.weight
        assert filled is not None and torch.equal(filled, embedding)
        save_file({second: embedding + 1}, path / "b.safetensors")
        assert "lm_head.weight and model.embed_tokens.weight differ" in refused(path)


def test_old_checkpoints_may_have_inverse_frequencies(copy_of_model: Copy) -> None:
    path = rewrite(copy_of_model(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_widened_exactly(copy_of_model: Copy, stored: torch.dtype) -> None:
    """Every 16-bit value is a float32 value."""
    path = copy_of_model()
    files = {name: value.to(stored) for name, value in tensors(path).items()}
    save_file(files, path / "model.safetensors")
    assert_filled(load(path), {name: value.float() for name, value in files.items()})


def test_float32_weights_are_rounded_to_bfloat16(copy_of_model: Copy) -> None:
    """To the nearest, not towards zero."""
    path = copy_of_model()
    model = load(path, torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert_filled(model, tensors(path))


def test_weights_are_copies_of_the_file(copy_of_model: Copy) -> None:
    """They do not change when the file does."""
    path = copy_of_model()
    before = tensors(path)
    model = load(path)
    save_file({k: torch.zeros_like(v) for k, v in before.items()}, path / "model.safetensors")
    assert_filled(model, before)


# What must be refused, with its name


def refused(path: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        load(path)
    return str(caught.value)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    path = make_model(tmp_path, shards=True)
    files = weight_files(path)
    for file in files[1:3]:
        file.unlink()
    message = refused(path, FileNotFoundError)
    assert files[1].name in message
    assert files[2].name in message
    assert files[0].name not in message
    with pytest.raises(FileNotFoundError, match=re.escape(files[1].name)):
        make_llm(path)


@pytest.mark.parametrize("size", [0, 4, 100, -5000, -1], ids=lambda n: f"to {n} bytes")
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    """A download that ended at the start, in the header, or just before the end."""
    path = make_model(tmp_path, shards=True)
    file = weight_files(path)[2]
    file.write_bytes(file.read_bytes()[:size])
    message = refused(path, OSError)
    assert str(file) in message
    assert "truncated" in message


def test_a_file_of_another_format_is_named(copy_of_model: Copy) -> None:
    """A pointer file of Git LFS under the name of the weights."""
    path = copy_of_model()
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid ...")
    assert str(path / "model.safetensors") in refused(path, OSError)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.embed_tokens.weight", (258, 64), (259, 64)),
        ("lm_head.weight", (64, 259), (259, 64)),
        (LAYER + "self_attn.q_proj.weight", (32, 64), (64, 64)),
        (LAYER + "self_attn.k_proj.weight", (64, 64), (32, 64)),
        (LAYER + "self_attn.v_proj.weight", (32, 63), (32, 64)),
        (LAYER + "self_attn.o_proj.weight", (64, 1), (64, 64)),
        (LAYER + "mlp.up_proj.weight", (192, 64), (96, 64)),
        (LAYER + "self_attn.q_norm.weight", (1,), (16,)),
        ("model.norm.weight", (1, 64), (64,)),
        ("model.norm.weight", (), (64,)),
    ],
    ids=str,
)
def test_a_misshapen_tensor_is_named(
    copy_of_model: Copy, name: str, shape: tuple[int, ...], needed: tuple[int, ...]
) -> None:
    """It must not be broadcast, cut, or written over its neighbour in a fused weight."""
    path = copy_of_model()
    message = refused(rewrite(path, **{name.replace(".", "__"): torch.zeros(shape)}))
    assert repr(name) in message
    assert f"shape {shape}" in message
    assert str(needed) in message
    assert str(path) in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        LAYER + "self_attn.q_proj.bias",
        LAYER + "self_attn.q_proj.weight_scale_inv",
        LAYER + "self_attn.qkv_proj.weight",
        "model.embed_tokens.lora_A.weight",
        "transformer.wte.weight",
        "lm_head.bias",
        "score.weight",
    ],
)
def test_an_unexpected_tensor_is_named(copy_of_model: Copy, name: str) -> None:
    """The model must not run without a layer, a bias or a scale that the file has."""
    path = copy_of_model()
    message = refused(rewrite(path, **{name.replace(".", "__"): torch.zeros(96, 64)}))
    assert f"{name!r}" in message
    assert str(path) in message


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        LAYER + "input_layernorm.weight",
        LAYER + "self_attn.k_norm.weight",
        LAYER + "self_attn.q_proj.weight",
        LAYER + "self_attn.k_proj.weight",
        LAYER + "self_attn.v_proj.weight",
        LAYER + "mlp.gate_proj.weight",
        LAYER + "mlp.up_proj.weight",
        LAYER + "mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(copy_of_model: Copy, name: str) -> None:
    """As the checkpoint spells it: the files have no qkv_proj."""
    path = copy_of_model()
    message = refused(rewrite(path, **{name.replace(".", "__"): None}))
    assert name in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("family", "tensor", "says"),
    [
        ("Phi3", LAYER + "self_attn.qkv_proj.weight", LAYER + "self_attn.qkv_proj.weight"),
        ("Qwen3Moe", LAYER + "mlp.experts.3.up_proj.weight", LAYER + "mlp.experts.3.up_proj"),
        ("Qwen3Moe", LAYER + "mlp.gate.weight", LAYER + "mlp.gate.weight"),
    ],
)
def test_a_missing_tensor_of_another_family_is_named(
    tmp_path: Path, family: str, tensor: str, says: str
) -> None:
    """As these files spell it: fused ones have no q_proj."""
    path = make_model(tmp_path, **MOE | dict(family=family))
    message = refused(rewrite(path, **{tensor.replace(".", "__"): None}))
    assert f"lack {says}" in message


@pytest.mark.parametrize(
    ("family", "tensor", "shape"),
    [
        ("Phi3", LAYER + "self_attn.qkv_proj.weight", (127, 64)),
        ("Phi3", LAYER + "mlp.gate_up_proj.weight", (96, 64)),
        ("Qwen3Moe", LAYER + "mlp.experts.3.up_proj.weight", (31, 64)),
        ("Qwen3Moe", LAYER + "mlp.experts.0.down_proj.weight", (32, 64)),
        ("Qwen3Moe", LAYER + "mlp.gate.weight", (3, 64)),
    ],
)
def test_a_misshapen_tensor_of_another_family_is_named(
    tmp_path: Path, family: str, tensor: str, shape: tuple[int, ...]
) -> None:
    path = make_model(tmp_path, **MOE | dict(family=family))
    message = refused(rewrite(path, **{tensor.replace(".", "__"): torch.zeros(shape)}))
    assert repr(tensor) in message and f"shape {shape}" in message


@pytest.mark.parametrize("expert", [4, 40])
def test_an_expert_too_many_is_refused(tmp_path: Path, expert: int) -> None:
    path = make_model(tmp_path, **MOE)
    name = f"{LAYER}mlp.experts.{expert}.up_proj.weight"
    message = refused(rewrite(path, **{name.replace(".", "__"): torch.zeros(32, 64)}))
    assert f"unexpected tensor {name!r}" in message


def test_integers_are_no_weights(copy_of_model: Copy) -> None:
    path = rewrite(copy_of_model(), model__norm__weight=torch.ones(64, dtype=torch.int32))
    assert "'model.norm.weight' has type I32, a model needs one of F64" in refused(path)


def test_a_tensor_both_whole_and_in_parts_is_refused(copy_of_model: Copy) -> None:
    """Else the last one read would win."""
    path = copy_of_model()
    name = LAYER + "self_attn.qkv_proj.weight"
    message = refused(rewrite(path, **{name.replace(".", "__"): torch.zeros(128, 64)}))
    assert "both fused and in parts" in message


def test_the_error_of_missing_layers_is_short(copy_of_model: Copy) -> None:
    """It has the first names and the number of the others."""
    path = copy_of_model()
    edit_config(path, num_hidden_layers=40, layer_types=None)
    message = refused(path)
    assert "model.layers.2." in message
    assert "more" in message
    assert len(message) < 1000


def test_a_missing_bias_is_named(copy_of_model: Copy) -> None:
    """It is not replaced by zeros."""
    path = copy_of_model()
    edit_config(path, attention_bias=True)
    assert "model.layers.0.self_attn.o_proj.bias" in refused(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """One may be left from an earlier download."""
    path = make_model(tmp_path, shards=True)
    first, second, *_ = weight_files(path)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    assert repr(name) in refused(path)


@pytest.mark.parametrize("tie", [False, True])
def test_an_untied_model_needs_a_head(tmp_path: Path, tie: bool) -> None:
    """It must not use an uninitialized head, nor the embedding."""
    path = make_model(tmp_path, tie_word_embeddings=True)
    edit_config(path, tie_word_embeddings=tie)
    if tie:
        load(path)
    else:
        assert "lm_head.weight" in refused(path)


@pytest.mark.parametrize(
    ("index", "says"),
    [("{", "not valid JSON"), ("[]", "JSON object"), ("{}", "weight_map"),
     ('{"weight_map": [1]}', "weight_map")],
)  # fmt: skip
def test_a_broken_index_is_named(copy_of_model: Copy, index: str, says: str) -> None:
    path = copy_of_model()
    (path / INDEX).write_text(index)
    message = refused(path, OSError)
    assert str(path / INDEX) in message
    assert says in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.bin"])
def test_bin_files_alone_are_refused(copy_of_model: Copy, name: str) -> None:
    """The error says that there are weights in another format."""
    path = copy_of_model()
    (path / "model.safetensors").rename(path / name)
    message = refused(path, FileNotFoundError)
    assert ".bin" in message
    assert "safetensors" in message


def test_a_directory_without_weights_is_named(copy_of_model: Copy) -> None:
    path = copy_of_model()
    (path / "model.safetensors").unlink()
    message = refused(path, FileNotFoundError)
    assert str(path) in message
    assert ".bin" not in message


# The directory


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "config.json"))):
        make_llm(tmp_path)


@pytest.mark.parametrize(
    "path", ["/no/such/model", "./no-such-model", "../no/such", "~/no-such-model", "no-such-model"]
)
def test_a_path_that_does_not_exist_is_named(path: str) -> None:
    """A misspelt path is not looked up on the hub."""
    with pytest.raises(FileNotFoundError, match=re.escape(repr(path))) as caught:
        make_llm(Path(path) if path.startswith("/") else path)  # type: ignore[arg-type]
    assert "does not exist" in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user/model"])
def test_a_path_that_cannot_exist_is_named(path: str) -> None:
    """Not just by an error of the system."""
    with pytest.raises(FileNotFoundError, match="model") as caught:
        resolve_model(path)
    assert repr(path) in str(caught.value)


def test_a_file_instead_of_a_directory_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    with pytest.raises(NotADirectoryError, match=re.escape(str(file))):
        make_llm(file)


def test_the_home_directory_is_expanded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert resolve_model(f"~/{model_dir.name}") == model_dir


def test_a_hub_id_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and with an OSError, not one of the hub's own classes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="'no-such-owner/no-such-model'") as caught:
        make_llm(Path("no-such-owner/no-such-model"))
    assert type(caught.value) is OSError
    assert "not a local directory" in str(caught.value)


# The config


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "JSON object"),
     ("\ufeff{}", "not valid JSON"), ("null", "JSON object")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_is_named(copy_of_model: Copy, name: str, text: str, says: str) -> None:
    path = copy_of_model()
    (path / name).write_text(text, encoding="utf-8")
    with pytest.raises(OSError, match=re.escape(str(path / name))) as caught:
        make_llm(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_not_text_is_named(copy_of_model: Copy, name: str) -> None:
    path = copy_of_model()
    (path / name).write_bytes(b"\xff\xfe\x80")
    with pytest.raises(OSError, match=re.escape(str(path / name))):
        make_llm(path)


def config_error(path: Path, **changes: Any) -> str:
    """The error for a config.json with `changes`, before anything is loaded."""
    edit_config(path, **changes)
    with pytest.raises((TypeError, ValueError)) as caught:
        make_llm(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("vocab_size", "the model needs (151936, 64)"),
        ("hidden_size", "the model needs (259, 4096)"),
        ("intermediate_size", "the model needs (64, 22016)"),
        ("num_hidden_layers", "the files lack model.layers.2."),
        ("num_attention_heads", "the model needs (64, 512)"),
    ],
)
def test_a_missing_size_is_transformers_default_and_the_files_differ(
    copy_of_model: Copy, field: str, says: str
) -> None:
    """The config class of Qwen3 has a default for every size; only the files show the mistake."""
    path = copy_of_model()
    message = config_error(path, **{field: None, "layer_types": None})
    assert says in message
    assert str(path) in message


def test_a_field_without_a_default_is_named(copy_of_model: Copy, tmp_path: Path) -> None:
    """Instead of a KeyError: an architecture that users add may lack defaults."""
    path = copy_of_model()
    edit_config(path, architectures=["Added"], vocab_size=None)

    def read(file: Mapping[str, Any]) -> Any:
        return decoder_fields(Fields(file, {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.registered, "Added", "")  # undone after the block
        register_model("Added", Family(read))
        assert "config.json has no field 'vocab_size'" in config_error(path)


def test_a_rope_theta_of_null_is_named(copy_of_model: Copy) -> None:
    """transformers does not fill it in either."""
    path = copy_of_model()
    edit_config(path, rope_parameters=None)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"rope_theta": None}))
    with pytest.raises(TypeError, match="rope_theta must be a number"):
        make_llm(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"), ("vocab_size", 259.0), ("vocab_size", 0), ("num_hidden_layers", 0),
        ("num_hidden_layers", -1), ("num_attention_heads", 0), ("num_key_value_heads", -2),
        ("head_dim", -16), ("head_dim", 15), ("intermediate_size", True), ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", -1.0), ("max_position_embeddings", 0), ("max_position_embeddings", "512"),
        ("eos_token_id", "257"), ("eos_token_id", [257, None]), ("tie_word_embeddings", "no"),
        ("attention_bias", 1), ("quantization_config", "fp8"), ("rope_parameters", [1]),
    ],
)  # fmt: skip
def test_a_field_of_another_type_or_range_is_named(
    copy_of_model: Copy, field: str, value: Any
) -> None:
    """Before the tokenizer or a tensor is loaded."""
    path = copy_of_model()
    edit_config(path, **{field: value})
    with pytest.raises((ValueError, TypeError), match=field) as caught:
        make_llm(path)
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3VLForConditionalGeneration", "GPT2Model", "Qwen3VLModel", "qwen3", 3, None],
)
def test_unsupported_architectures_are_refused(copy_of_model: Copy, architecture: Any) -> None:
    """Related ones are not loaded as Qwen3."""
    message = config_error(copy_of_model(), architectures=[architecture])
    assert repr(architecture) in message
    assert "Qwen3ForCausalLM" in message


@pytest.mark.parametrize(
    "architectures", [None, [], ["Qwen3ForCausalLM", "Qwen3Model"], "Qwen3ForCausalLM"]
)
def test_architectures_must_have_one_name(copy_of_model: Copy, architectures: Any) -> None:
    assert "architectures" in config_error(copy_of_model(), architectures=architectures)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_sliding_window": True, "sliding_window": "128"}, ["sliding_window", "'128'"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding-window"]),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["linear_attention"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quant_method", "'hqq'", "'awq'"]),
        ({"quantization_config": {"bits": 4}}, ["quant_method", "None", "'fp8'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'silu'", "'gelu'"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
    ],
    ids=str,
)
def test_unsupported_config_fields_are_refused(
    copy_of_model: Copy, changes: dict[str, Any], says: list[str]
) -> None:
    """They are not ignored."""
    path = copy_of_model()
    message = config_error(path, **changes)
    assert [text for text in [*says, str(path)] if text not in message] == [], message


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "ntk-by-parts", "factor": 2.0}, ["rope_type", "'ntk-by-parts'", "yarn"]),
        ({"rope_type": None}, ["rope_type", "None"]),
        ({"rope_type": "yarn"}, ["'yarn'", "factor"]),
        ({"rope_type": "linear"}, ["'linear'", "factor"]),
        ({"rope_type": "llama3", "factor": 2.0}, ["'llama3'", "low_freq_factor"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_type": "linear", "factor": 0}, ["factor"]),
        ({"rope_type": "yarn", "factor": "4"}, ["factor", "'4'"]),
    ],
    ids=str,
)
def test_unsupported_rope_is_refused(
    copy_of_model: Copy, spelling: str, scaling: dict[str, Any], says: list[str]
) -> None:
    """Unknown types, and missing or wrong factors."""
    path = copy_of_model()
    changes: dict[str, Any] = {"rope_parameters": None, "rope_theta": 1e4}
    edit_config(path, **changes)
    message = config_error(path, **{spelling: {"rope_theta": 1e4, **scaling}})
    assert [text for text in says if text not in message] == [], message


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_bar_is_drawn_on_terminals_only(
    is_terminal: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into files, where it would be pages of control characters."""
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stderr)
    with make_llm(model_dir):
        pass
    assert ("Loading" in stderr.getvalue()) == is_terminal
    if is_terminal:
        assert "100%" in stderr.getvalue()


# Threads


def slow_down(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Make every read of a tensor wait first. Several threads read, as they do large files."""
    monkeypatch.setattr(loader, "SMALL", 0)
    take = InFile.__getitem__

    def waiting(self: InFile, index: Any) -> torch.Tensor:
        wait()
        return take(self, index)

    monkeypatch.setattr(InFile, "__getitem__", waiting)


def test_tensors_are_read_in_parallel(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the disk does not wait for copies."""
    expected = load(model_dir)
    num_reads = len(tensors(model_dir))
    pairs = threading.Barrier(2, timeout=LIMIT)
    last = iter([True] * (num_reads % 2))  # of an odd number, one read has no partner
    slow_down(monkeypatch, lambda: next(last, False) or pairs.wait())
    for param, other in zip(load(model_dir).parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, other)


def test_small_files_are_read_by_one_thread(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each thread, glibc keeps a heap: 4 threads left 3 MiB behind, of a file of 94 MiB."""
    threads, take = set[str](), InFile.__getitem__

    def noting(self: InFile, index: Any) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return take(self, index)

    monkeypatch.setattr(InFile, "__getitem__", noting)
    load(model_dir)
    assert threads == {"nanovllm-load_0"}


def test_the_first_wrong_tensor_is_reported(
    copy_of_model: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that a thread finds first."""
    path = copy_of_model()

    def norms() -> list[str]:
        names = safe_open(path / "model.safetensors", "pt").keys()
        return [name for name in names if "norm" in name]

    first, *_, last = norms()
    wrong = {first: torch.zeros(3), last: torch.zeros(5)}
    rewrite(path, **{name.replace(".", "__"): tensor for name, tensor in wrong.items()})
    assert norms().index(first) < norms().index(last)
    shape = InFile.shape.fget  # type: ignore[attr-defined]

    def slow(self: InFile) -> Any:
        time.sleep(0.2 if shape(self) == (3,) else 0.0)
        return shape(self)

    monkeypatch.setattr(loader, "SMALL", 0)
    monkeypatch.setattr(InFile, "shape", property(slow))
    assert repr(first) in refused(path)


def test_ctrl_c_ends_loading_and_its_threads(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the whole model: what no thread reads by then is not read."""
    reads, ending, shutdown = count(1), threading.Event(), ThreadPoolExecutor.shutdown

    def wait() -> None:
        if (number := next(reads)) == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if number >= 5:
            assert ending.wait(LIMIT)

    def end(self: ThreadPoolExecutor, *arguments: Any, **options: Any) -> None:
        ending.set()
        shutdown(self, *arguments, **options)

    slow_down(monkeypatch, wait)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(KeyboardInterrupt):
        load(model_dir)
    assert 5 < next(reads) <= 5 + NUM_THREADS < len(tensors(model_dir))
    wait_until(
        "threads are left",
        lambda: not [t for t in threading.enumerate() if t.name.startswith("nanovllm-load")],
    )


# Random weights, and memory


def test_dummy_weights_need_no_files_and_depend_on_the_seed_alone(copy_of_model: Copy) -> None:
    """They have the standard deviation 0.02, and no two are equal."""
    path = copy_of_model()
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()

    def first_tokens(seed: int) -> list[int]:
        with make_llm(path, load_format="dummy", seed=seed) as llm:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            return llm.generate([1, 2, 3], params, use_tqdm=False)[0]["token_ids"]

    assert first_tokens(1) == first_tokens(1)

    def weights(seed: int) -> list[torch.Tensor]:
        model = build_model(ModelConfig.from_dir(path), max_positions=16)
        load_dummy(model, model, seed)
        return list(model.parameters())

    pairs = [list(zip(weights(1), weights(seed), strict=True)) for seed in (1, 2)]
    assert all(torch.equal(a, b) for a, b in pairs[0])
    assert not any(torch.equal(a, b) for a, b in pairs[1] if a.dim() > 1)
    matrices = [a for a, _ in pairs[0] if a.dim() > 1]
    for index, a in enumerate(matrices):
        assert 0.018 < float(a.std()) < 0.022
        assert not any(torch.equal(a[:4, :4], b[:4, :4]) for b in matrices[:index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dummy_weights_do_not_depend_on_the_type(dtype: torch.dtype) -> None:
    """Other numbers would be drawn for a type of another size."""

    def values(dtype: torch.dtype) -> torch.Tensor:
        param = torch.nn.Parameter(torch.empty(7, 9, dtype=dtype))
        values = dummy_values(param, torch.Generator().manual_seed(0))
        assert values is not None and values.dtype == dtype
        return values

    assert torch.equal(values(dtype), values(torch.float32).to(dtype))


def test_dummy_weights_keep_the_callers_random_state(model_dir: Path) -> None:
    before = torch.get_rng_state()
    model = build_model(ModelConfig.from_dir(model_dir), max_positions=16)
    load_dummy(model, model, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_needs_less_than_twice_the_model(tmp_path: Path) -> None:
    """Shards are not all read before the first is placed, nor packed beside all originals."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def resident_mib() -> float:
        match = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
        assert match is not None
        return int(match[1]) / 1024

    shape = SHAPE | dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, head_dim=256
    )
    tmp_path.joinpath("config.json").write_text(
        json.dumps({**shape, "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e4})
    )
    with torch.device("meta"):
        model = build_model(ModelConfig.from_dir(tmp_path), max_positions=16)
    weight_map = {}
    size = 0.0
    for index, (name, param) in enumerate(model.named_parameters()):
        part = {}
        for fused, parts in PARTS.items():
            if fused in name:
                sizes = [param.shape[0] // len(parts)] * len(parts)
                if fused == "qkv_proj":
                    sizes = [1024, 512, 512]
                part = {
                    name.replace(fused, p): torch.ones(n, param.shape[1])
                    for p, n in zip(parts, sizes, strict=True)
                }
        part = part or {name: torch.ones(param.shape)}
        save_file(part, tmp_path / f"{index}.safetensors")
        weight_map |= dict.fromkeys(part, f"{index}.safetensors")
        size += param.numel() * 4 / 2**20
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert 180 < size < 240

    peak = before = resident_mib()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        llm = make_llm(tmp_path)
    finally:
        done.set()
        watcher.join()
    with llm:
        assert resident_mib() - before < 1.6 * size
        assert peak - before < 2 * size


def test_options_of_the_hub_reach_the_download(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `LLM`: the model at the revision, and a tokenizer at its own main branch."""
    calls = []

    def snapshot_download(source: str, **options: Any) -> str:
        calls.append((source, options["revision"], options["cache_dir"]))
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    options: dict[str, Any] = dict(device="cpu", num_kvcache_blocks=8, download_dir="downloads")
    with LLM("some/model", tokenizer="some/tokenizer", revision="v1", **options) as llm:
        assert llm.config.model == "some/model"
    assert calls == [
        ("some/model", "v1", Path("downloads")),
        ("some/tokenizer", None, Path("downloads")),
    ]
    with pytest.raises(ValueError, match=r"revision='v1' is one of the hub, but model .* is a l"):
        LLM(model_dir, revision="v1")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "input_layernorm"])
def test_a_tensor_that_is_not_finite_is_named(value: float, name: str, copy_of_model: Copy) -> None:
    """A fused one by its part's name in the file."""
    path = copy_of_model()
    full = f"{LAYER}{name}.weight"
    broken = tensors(path)[full].clone()
    broken.view(-1)[7] = value
    rewrite(path, **{full.replace(".", "__"): broken})
    message = f"tensor '{full}' in model.safetensors has values that are NaN or infinite"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        load(path)


def test_values_may_be_too_large_for_a_type_and_sums_too_large(copy_of_model: Copy) -> None:
    """The sum of the norm's weights is 96,000, and float16 ends at 65,504."""
    path, norm = copy_of_model(), f"{LAYER}input_layernorm.weight"
    large = torch.full_like(tensors(path)[norm], 1500.0)
    rewrite(path, **{norm.replace(".", "__"): large})
    assert load(path, torch.float16).get_parameter(norm).sum().isinf()
    large[0] = 1e5
    rewrite(path, **{norm.replace(".", "__"): large})
    assert load(path)
    with pytest.raises(ValueError, match=f"{norm} has values that are infinite in dtype float16"):
        load(path, torch.float16)
