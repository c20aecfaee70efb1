"""A family from outside of the package: its tokens equal those of a plain loop in PyTorch.

The loop has no cache, no batch and no ranks: it computes each sequence anew for every token.
It costs more than 20 seconds: the loop's, and those of Triton's interpreter.
"""

import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sandwich_family
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer
from drafts import drafting_of, make_eager
from reference import (
    HARD,
    NUM_STEPS,
    REGIMES,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_aborts,
    check_hits,
    generate,
    make_llm,
    make_prompts,
)
from safetensors.torch import load_file, save_file
from strangers import continued, loop_case, registered
from waiting import LIMIT

import nanovllm
from nanovllm import SamplingParams
from nanovllm.adapters.peft import read_adapter
from nanovllm.command.info import describe
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.cache_spec import CacheSpec, KeysAndValues
from nanovllm.layers.few_rows_forms import operands_of
from nanovllm.models import family as families
from nanovllm.models import model_size
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread", "crowded", "known")

NAME = "SandwichForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIG: dict[str, Any] = dict(
    architectures=[NAME], vocab_size=259, hidden_size=64, intermediate_size=96,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=16,
    rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=257,
    hidden_act="gelu_pytorch_tanh", rope_theta=1e6, local_theta=100.0, query_scalar=7.0,
    final_logit_softcapping=9.0, attn_logit_softcapping=2.0, sliding_window=20, dtype="float32",
    layer_types=[SLIDING, FULL] * 2,
)  # fmt: skip
THEIRS, OURS = "model.language_model.", "model."
SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {},
    **REGIMES,
    "two ranks, small pool": dict(HARD, tensor_parallel_size=2),
}


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    with registered(NAME, sandwich_family.FAMILY):
        yield


def heads_of(config: dict[str, Any], index: int) -> list[int]:
    """A layer's numbers of query heads and key heads, and their size."""
    above = "swa_" if config["layer_types"][index] == SLIDING else ""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    return [config[f"{above}{name}"] for name in names]


def random_weights(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """By the names of the files."""
    generator = torch.Generator().manual_seed(5)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (259, hidden), "norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        num_heads, num_kv_heads, dim = heads_of(config, index)
        heads, kv_heads = num_heads * dim, num_kv_heads * dim
        layer = {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,), "pre_feedforward_layernorm": (hidden,),
            "post_feedforward_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return {
        f"{THEIRS}{name}.weight": torch.randn(shape, generator=generator)
        * (0.15 if len(shape) > 1 else 0.3)
        for name, shape in shapes.items()
    }


def write_model(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = CONFIG | changes
    (path / "config.json").write_text(json.dumps(config))
    unused = {"model.visual.patches.weight": torch.zeros(3, 3)}
    save_file(random_weights(config) | unused, path / "model.safetensors")
    byte_tokenizer().save_pretrained(path)
    return path


class Loop:
    """The model in plain PyTorch, for one sequence at a time."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self.weights = {name.removeprefix(THEIRS): tensor for name, tensor in weights.items()}
        self.config = config

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x: torch.Tensor, theta: float) -> torch.Tensor:
        """Heads [H, T, D]."""
        half = x.shape[-1] // 2
        frequencies = theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, x: torch.Tensor, index: int) -> torch.Tensor:
        config, name, length = self.config, f"layers.{index}.self_attn", len(x)
        is_local = config["layer_types"][index] == SLIDING
        theta = config["local_theta"] if is_local else config["rope_theta"]
        num_heads, num_kv_heads, head_dim = heads_of(config, index)
        q, k, v = (self.linear(x, f"{name}.{n}_proj").view(length, -1, head_dim) for n in "qkv")
        q = self.rotate(self.norm(q, f"{name}.q_norm").transpose(0, 1), theta)
        k = self.rotate(self.norm(k, f"{name}.k_norm").transpose(0, 1), theta)
        group = num_heads // num_kv_heads
        k, v = (each.repeat_interleave(group, 0) for each in (k, v.transpose(0, 1)))
        ages = torch.arange(length)[:, None] - torch.arange(length)
        seen = (ages >= 0) & (ages < (config["sliding_window"] if is_local else length))
        scores = q @ k.transpose(1, 2) / math.sqrt(config["query_scalar"])
        cap = config["attn_logit_softcapping"]
        scores = torch.tanh(scores / cap) * cap
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        attended = (weights @ v).transpose(0, 1).flatten(1)
        return self.linear(attended, f"{name}.o_proj")

    def feed_forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        name = f"layers.{index}.mlp"
        gate = F.gelu(self.linear(x, f"{name}.gate_proj"), approximate="tanh")
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of the token after `ids`."""
        x = self.weights["embed_tokens.weight"][ids] * math.sqrt(self.config["hidden_size"])
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            mixed = self.attention(self.norm(x, f"{name}.input_layernorm"), index)
            x = x + self.norm(mixed, f"{name}.post_attention_layernorm")
            fed = self.feed_forward(self.norm(x, f"{name}.pre_feedforward_layernorm"), index)
            x = x + self.norm(fed, f"{name}.post_feedforward_layernorm")
        last = self.linear(self.norm(x[-1:], "norm"), "embed_tokens")[0]
        cap = self.config["final_logit_softcapping"]
        return torch.tanh(last / cap) * cap


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = write_model(tmp_path_factory.mktemp("stranger"))
    loop = Loop(load_file(path / "model.safetensors"), CONFIG)
    return loop_case(path, loop.logits, make_prompts())


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_stranger_equals_the_loop_with(name: str, case: Case) -> None:
    with make_llm(case.path, **SCENARIOS[name]) as llm:
        assert_same(generate(llm, case), case.expected)
        if "small pool" in name:
            assert llm.scheduler.num_preemptions >= 3
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), dict(attention_backend="torch"), HARD, dict(scheduling="mixed"),
     SCENARIOS["n-grams"]],
)  # fmt: skip
def test_a_stranger_equals_the_loop_on_a_device(options: dict[str, Any], case: Case) -> None:
    """Layers with other heads have plans of their own, in decode graphs too."""
    with make_llm(case.path, device="cuda", **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


def test_prefix_hits_of_a_stranger_keep_the_output(case: Case) -> None:
    check_hits(case, kvcache_block_size=4, max_num_batched_tokens=64)


def test_forks_of_a_stranger_equal_the_loop(case: Case) -> None:
    with make_llm(case.path, **HARD) as llm:
        params = [SamplingParams(temperature=0, n=2, max_tokens=NUM_STEPS, ignore_eos=True)]
        outputs = llm.generate(case.prompts[:12], params * 12, use_tqdm=False)
        for output, tokens in zip(outputs, case.tokens, strict=False):
            assert [one.token_ids for one in output.outputs] == [tokens, tokens]
        audit_at_rest(llm)


def test_aborted_requests_of_a_stranger_leave_correct_kv(case: Case) -> None:
    check_aborts(case, **SMALL_POOL, max_num_batched_tokens=32)


def test_weights_of_a_stranger_are_updated_by_either_name(case: Case) -> None:
    """What files call them, and what the model does; the factors of its norms follow."""
    prompts, weights = case.prompts[:8], random_weights()
    other = {name: torch.roll(tensor, 1, 0) for name, tensor in weights.items()}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(case.path) as llm, torch.inference_mode():
        for theirs in (False, True):
            names = {n: n if theirs else n.replace(THEIRS, OURS) for n in weights}
            llm.update_weights({names[name]: tensor for name, tensor in other.items()})
            outputs = llm.generate(prompts, params, use_tqdm=False)
            loop = Loop(other, CONFIG)
            expected = [
                continued(loop.logits, prompt).argmax(-1).tolist()[:8] for prompt in prompts
            ]
            assert [out["token_ids"] for out in outputs] == expected
            unused = {"model.visual.patches.weight": torch.zeros(3, 3)}
            llm.update_weights({names[n]: tensor for n, tensor in weights.items()} | unused)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [out["token_ids"] for out in outputs] == [t[:8] for t in case.tokens[:8]]
        read = llm.get_weights()
        assert read.keys() == {name.replace(THEIRS, OURS) for name in weights}
        assert all(torch.equal(read[n.replace(THEIRS, OURS)], t) for n, t in weights.items())


ALIKE = dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=32)


def test_a_draft_model_shares_the_blocks_of_the_layers_without_a_window(
    case: Case, tmp_path: Path
) -> None:
    """It is the stranger with heads of one shape, so that its guesses are seldom right."""
    config = {"method": "draft_model", "model": str(write_model(tmp_path, **ALIKE))}
    with make_eager(case.path, config | {"num_speculative_tokens": 3}, **SMALL_POOL) as llm:
        assert_same(generate(llm, case), case.expected)
        assert drafting_of(llm).num_drafted > 100
        audit_at_rest(llm)


def test_a_draft_model_with_heads_of_two_shapes_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="a draft model needs layers with equal numbers and sizes"):
        make_llm(case.path, speculative_config=dict(method="draft_model", model=str(case.path)))


def test_a_draft_model_needs_the_largest_rows_in_layers_without_a_window(tmp_path: Path) -> None:
    """Else the blocks of its own layers would have other numbers."""
    wide = dict(swa_num_attention_heads=8, swa_num_key_value_heads=8)
    model, draft = write_model(tmp_path / "a", **wide), write_model(tmp_path / "b", **ALIKE)
    with pytest.raises(ValueError, match="layers without a window have the largest rows"):
        make_llm(model, speculative_config=dict(method="draft_model", model=str(draft)))


def test_adapters_of_a_stranger_have_the_names_of_its_files(case: Case, tmp_path: Path) -> None:
    model = build_model(ModelConfig.from_dir(case.path), 16)
    file = dict(peft_type="LORA", r=2, lora_alpha=2, target_modules=["q_proj"])
    (tmp_path / "adapter_config.json").write_text(json.dumps(file))
    start = f"base_model.model.{THEIRS}layers.1.self_attn.q_proj.lora_"
    pair = {f"{start}A.weight": torch.ones(2, 64), f"{start}B.weight": torch.ones(128, 2)}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    assert [*read_adapter(tmp_path, model, 8)] == [f"{OURS}layers.1.self_attn.q_proj"]


def test_rules_of_quantized_strangers_have_the_names_of_their_files() -> None:
    rules = dict(quant_method="fp8", modules_to_not_convert=[f"{THEIRS}layers.0"])
    config = ModelConfig.parse(CONFIG | dict(quantization_config=rules))
    schemes = [config.quantization.scheme(f"{OURS}layers.{i}.mlp.up_proj") for i in (0, 1)]
    assert schemes[0] is None and schemes[1] is not None


def test_what_is_left_out_is_logged_once(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanovllm"), make_llm(case.path):
        pass
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 1 and "model.visual.patches.weight" in said[0]


def test_a_stranger_is_described_before_it_is_built(case: Case) -> None:
    config = ModelConfig.from_dir(case.path)
    with torch.device("meta"):
        model = build_model(config, 16)
    count = sum(param.numel() for param in model.parameters())
    assert model_size.num_params(config) == count
    assert describe({"model": str(case.path), "device": "cpu"})["num_parameters"] == count
    assert [layer.cache.window for layer in config.layers] == [20, None] * 2  # type: ignore[attr-defined]
    assert config.longest_window is None
    with pytest.raises(ValueError, match=r"cannot split .* num_attention_heads=4,"):
        config.check_parallel_size(3)


def test_kernels_for_few_rows_take_blocks_with_norms_after_their_parts(case: Case) -> None:
    model = build_model(ModelConfig.from_dir(case.path), 16)
    model.bind(Backend(TorchBackend(), PLAIN))
    layers: list[Any] = list(model.model.layers)
    assert {len(operands_of(layer)) for layer in layers} == {4}


def test_a_stranger_equals_the_loop_in_triton(case: Case, kernel_device: str) -> None:
    """A few tokens, as the kernels may be interpreted."""
    options = dict(device=kernel_device, attention_backend="triton", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with make_llm(case.path, **SMALL_POOL, **options) as llm:
        assert len(llm.model_runner.shard.backend.others) == 1
        some = [i for i, prompt in enumerate(case.prompts) if 20 < len(prompt) < 40][:3]
        outputs = llm.generate([case.prompts[i] for i in some], params, use_tqdm=False)
        assert [out["token_ids"] for out in outputs] == [case.tokens[i][:3] for i in some]


@pytest.mark.usefixtures("kernel_device")
def test_a_backend_that_computes_no_soft_caps_of_codes_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, **ALIKE)
    with pytest.raises(ValueError, match=r"'triton' needs kv_cache_dtype='auto' .* soft caps"):
        make_llm(path, attention_backend="triton", kv_cache_dtype="fp8")


@dataclass(frozen=True)
class State(CacheSpec):
    """What no layer keeps yet."""


def test_what_layers_cannot_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the engine has caches for it."""
    monkeypatch.setattr(sandwich_family.SandwichConfig, "layer_shape", keeps(State(), 2))
    with pytest.raises(ValueError, match="layers that keep State are not supported"):
        ModelConfig.parse(CONFIG)


def keeps(cache: CacheSpec, *layers: int) -> Any:
    """A `layer_shape` that says something else of these layers."""
    shape_of = sandwich_family.SandwichConfig.layer_shape

    def other(self: Any, index: int) -> Any:
        shape = shape_of(self, index)
        return replace(shape, cache=cache) if index in layers else shape

    return other


@pytest.mark.usefixtures("compiler")
def test_layers_that_keep_something_else_than_their_shape_says_are_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for other heads gives wrong results."""
    cache = KeysAndValues(8, 1, 16, window=20)
    monkeypatch.setattr(sandwich_family.SandwichConfig, "layer_shape", keeps(cache, 0, 2))
    with pytest.raises(ValueError, match=r"layer 0 of .* keeps .*`layer_shape` says"):
        make_llm(case.path, attention_backend="cpu")


# The registry


def test_a_family_must_read_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    family = sandwich_family.FAMILY
    monkeypatch.setitem(families.registered, NAME, replace(family, read=dict))
    with pytest.raises(TypeError, match=f"the family of {NAME} must read a ModelConfig"):
        ModelConfig.parse(CONFIG)


@pytest.mark.parametrize(
    ("family", "error", "says"),
    [
        ("sandwich_family", ValueError, '"module:NAME"'),
        (":FAMILY", ValueError, '"module:NAME"'),
        ("a:b c", ValueError, '"module:NAME"'),
        (sandwich_family, TypeError, "must be a Family"),
        (None, TypeError, "must be a Family"),
    ],
)
def test_what_is_no_family_is_refused(family: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        nanovllm.register_model("Other", family)
    assert "Other" not in families.architectures()


@pytest.mark.parametrize(
    ("place", "says"),
    [("no_such_module:FAMILY", "no_such_module"), ("sandwich_family:NONE", "NONE"),
     ("sandwich_family:NAMES", "must be a Family")],
)  # fmt: skip
def test_a_family_that_is_not_there_is_an_error(
    place: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.registered, NAME, "")  # undone after the test
    nanovllm.register_model(NAME, place)
    path = write_model(tmp_path)
    with pytest.raises((TypeError, ValueError), match=says):
        make_llm(path)


def test_a_family_that_workers_cannot_import_is_refused_before_they_start(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank needs no import."""
    monkeypatch.setitem(families.registered, NAME, "")  # undone after the test
    family = sandwich_family.FAMILY
    nanovllm.register_model(NAME, Family(family.read, family.build, family.names))
    monkeypatch.setattr("nanovllm.engine.ranks.workers.Workers", None)
    with pytest.raises(ValueError, match=f"{NAME}.*cannot be|{NAME}.*not at the top of a module"):
        make_llm(case.path, tensor_parallel_size=2)
    with make_llm(case.path) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (out,) = llm.generate([case.prompts[0]], params, use_tqdm=False)
        assert out["token_ids"] == case.tokens[0][:4]
    with pytest.raises(ValueError, match=NAME):
        nanovllm.AsyncLLM(str(case.path), device="cpu")


SCRIPT = """
import asyncio, sys
import nanovllm
nanovllm.register_model("SandwichForCausalLM", "sandwich_family:FAMILY")

async def main():
    llm = nanovllm.AsyncLLM(sys.argv[1], device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
    params = nanovllm.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    print([i async for event in llm.generate(eval(sys.argv[2]), params) for i in event.token_ids])
    llm.close()

asyncio.run(main())
"""


@pytest.mark.slow
def test_an_engine_in_its_own_process_knows_a_stranger(case: Case) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(case.path), str(case.prompts[3])],
        capture_output=True, text=True, timeout=LIMIT, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\[.*\]", done.stdout)[-1] == str(case.tokens[3][:6])
