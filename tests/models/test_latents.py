"""Latent caches: a family of DeepSeek's attention equals a plain loop that has no latents.

The loop computes keys and values of all heads, and each sequence anew for every token.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import latent_family
import pytest
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer
from drafts import drafting_of, make_eager
from reference import (
    HARD,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_freed_blocks,
    check_hits,
    check_samples,
    generate,
    make_llm,
    make_prompts,
    make_some_prompts,
)
from safetensors.torch import save_file
from strangers import loop_case, registered
from test_strangers import SCENARIOS, Loop

from nanovllm import SamplingParams
from nanovllm.bench.roofline import prefill_flops
from nanovllm.command.info import describe
from nanovllm.layers.backend import AttentionSpec
from nanovllm.layers.backends.choice import build_backend
from nanovllm.models import model_size
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread", "crowded", "known")

NAME = "LatentForCausalLM"
CONFIG: dict[str, Any] = dict(
    architectures=[NAME], vocab_size=259, hidden_size=64, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, head_dim=8, qk_nope_head_dim=12, kv_lora_rank=24,
    rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=257,
    rope_theta=1e4, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    with registered(NAME, latent_family.FAMILY):
        yield


def random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, inner, rank = config["hidden_size"], config["intermediate_size"], config["kv_lora_rank"]
    heads, plain, rotated = (
        config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (259, hidden), "norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * (plain + rotated), hidden),
            "self_attn.kv_a_proj": (rank + rotated, hidden), "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * 2 * plain, rank),
            "self_attn.o_proj": (hidden, heads * plain), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return {
        f"model.{name}.weight": torch.randn(shape, generator=generator) * 0.3
        if len(shape) > 1
        else 1 + 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def write_model(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(random_weights(CONFIG | changes), path / "model.safetensors")
    byte_tokenizer().save_pretrained(path)
    return path


class LatentLoop(Loop):
    """The model in plain PyTorch, for one sequence at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(random_weights(config), config)
        self.weights = {n.removeprefix("model."): weight for n, weight in self.weights.items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def attention(self, x: torch.Tensor, index: int) -> torch.Tensor:
        config, name, length = self.config, f"layers.{index}.self_attn", len(x)
        plain, rotated = config["qk_nope_head_dim"], config["head_dim"]
        q = self.linear(x, f"{name}.q_proj").view(length, -1, plain + rotated).transpose(0, 1)
        latent, key = self.linear(x, f"{name}.kv_a_proj").split(
            [config["kv_lora_rank"], rotated], 1
        )
        latent = self.norm(latent, f"{name}.kv_a_layernorm")
        kv = self.linear(latent, f"{name}.kv_b_proj").view(length, -1, 2 * plain).transpose(0, 1)
        key = self.rotate(key[None], config["rope_theta"]).expand(len(q), -1, -1)
        k, v = torch.cat([kv[..., :plain], key], -1), kv[..., plain:]
        q = torch.cat([q[..., :plain], self.rotate(q[..., plain:], config["rope_theta"])], -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(plain + rotated)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.linear(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def feed_forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        name = f"layers.{index}.mlp"
        gate = F.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def logits(self, ids: list[int]) -> torch.Tensor:
        x = self.weights["embed_tokens.weight"][ids]
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), index)
            x = x + self.feed_forward(self.norm(x, f"{name}.post_attention_layernorm"), index)
        return self.linear(self.norm(x[-1:], "norm"), "embed_tokens")[0]


def make_case(path: Path, prompts: list[list[int]], **changes: Any) -> Case:
    return loop_case(write_model(path, **changes), LatentLoop(CONFIG | changes).logits, prompts)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("latent"), make_some_prompts())


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_latents_equal_the_loop_with(name: str, case: Case) -> None:
    with make_llm(case.path, **SCENARIOS[name]) as llm:
        assert_same(generate(llm, case), case.expected)
        if "small pool" in name:
            assert llm.scheduler.num_preemptions >= 10
        audit_at_rest(llm)


def test_latents_equal_the_loop_in_triton(case: Case, kernel_device: str) -> None:
    """A few tokens, as the kernels may be interpreted."""
    options = dict(device=kernel_device, attention_backend="triton", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with make_llm(case.path, **SMALL_POOL, **options) as llm:
        some = [i for i, prompt in enumerate(case.prompts) if 20 < len(prompt) < 40][:3]
        outputs = llm.generate([case.prompts[i] for i in some], params, use_tqdm=False)
        assert [out["token_ids"] for out in outputs] == [case.tokens[i][:3] for i in some]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), dict(attention_backend="torch"), HARD, SCENARIOS["n-grams"]],
)
def test_latents_equal_the_loop_on_a_device(options: dict[str, Any], case: Case) -> None:
    with make_llm(case.path, device="cuda", **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


def test_a_token_takes_one_row_in_each_layer(case: Case) -> None:
    with make_llm(case.path, kvcache_block_size=4) as llm:
        pool = llm.model_runner.shard.caches.kv
        assert pool.block_bytes == 4 * 3 * 32 * 4
        layer = llm.model_runner.shard.model.attentions[1]
        assert layer.kv.k_cache.data_ptr() == layer.kv.v_cache.data_ptr()
        assert llm.config.attention_backend in ("cpu", "torch")
    info = describe({"model": str(case.path), "device": "cpu", "dtype": "float32"})
    assert info["kv_bytes_per_token"] == 3 * 32 * 4


def test_the_roofline_counts_no_product_with_columns_of_keys_alone(case: Case) -> None:
    config = ModelConfig.from_dir(case.path)
    flops = [prefill_flops(config, [n]) for n in (10, 11, 12)]
    of_pair = 2 * 4 * (32 + 24)  # in one layer; in the last one, only the last token is a query
    assert flops[0] - 2 * flops[1] + flops[2] == 2 * of_pair


def test_prefix_hits_of_latents_keep_the_output(case: Case) -> None:
    check_hits(case, kvcache_block_size=4, max_num_batched_tokens=64)


def test_samples_share_latents(case: Case) -> None:
    check_samples(case, **HARD)


@pytest.mark.usefixtures("compiler")
def test_freed_latents_are_never_read(case: Case) -> None:
    check_freed_blocks(case, **HARD, attention_backend="cpu")


def test_latents_are_the_same_after_sleep(case: Case) -> None:
    with make_llm(case.path, enable_sleep_mode=True) as llm:
        llm.sleep()
        llm.wake_up()
        assert_same(generate(llm, case), case.expected)


def test_a_draft_model_may_keep_latents(case: Case) -> None:
    """It is the model itself, so that all drafts are right."""
    config = {"method": "draft_model", "model": str(case.path), "num_speculative_tokens": 3}
    with make_eager(case.path, config, **SMALL_POOL) as llm:
        assert_same(generate(llm, case), case.expected)
        drafting = drafting_of(llm)
        assert sum(drafting.accepted_at) > 0.9 * drafting.num_drafted > 100
        audit_at_rest(llm)


def test_any_width_works_in_plain_pytorch(tmp_path: Path) -> None:
    case = make_case(tmp_path, make_prompts()[::4], kv_lora_rank=21)
    with make_llm(tmp_path) as llm:
        assert llm.config.attention_backend == "torch"
        assert_same(generate(llm, case), case.expected)
    with pytest.raises(ValueError, match=r"a head_dim that is a multiple of 8 .* got 29"):
        make_llm(tmp_path, attention_backend="cpu")


@pytest.mark.usefixtures("compiler")
def test_wide_rows_are_computed_by_the_cpus_kernels(tmp_path: Path) -> None:
    """Rows of more than 512 numbers, as DeepSeek's, of which 512 are the value."""
    case = make_case(tmp_path, make_prompts()[::8], kv_lora_rank=512, num_hidden_layers=1)
    with make_llm(tmp_path) as llm:
        assert llm.config.attention_backend == "cpu"
        assert_same(generate(llm, case), case.expected)
    with pytest.raises(ValueError, match=r"and at most 1024, got 1040"):
        make_llm(write_model(tmp_path, kv_lora_rank=1032), attention_backend="cpu")


def test_backends_that_cannot_read_latents_say_so(kernel_device: str) -> None:
    options: dict[str, Any] = dict(
        dtype=torch.bfloat16, num_heads=4, num_kv_heads=1, block_size=256, in_graphs=True,
        kv_dtype=torch.bfloat16,
    )  # fmt: skip
    of_rows = partial(AttentionSpec, **options, value_width=512)
    device, gpu = torch.device(kernel_device), torch.device("cuda")
    with pytest.raises(ValueError, match="'flash_attn' cannot compute attention to latent rows"):
        build_backend("flash_attn", of_rows(gpu, head_dim=128))
    with pytest.raises(ValueError, match="latent rows of less than 1024 numbers, got 1024"):
        build_backend("triton", of_rows(device, head_dim=1024))
    with pytest.raises(ValueError, match="cannot read latent rows with sinks"):
        build_backend("triton", of_rows(device, head_dim=576, needs=frozenset(["sinks"])))


def test_codes_of_latents_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' needs keys and values"):
        make_llm(case.path, kv_cache_dtype="fp8")
    info = describe({"model": str(case.path), "device": "cpu", "kv_cache_dtype": "fp8"})
    assert not info["supported"] and "latent rows" in info["refusal"]


def test_ranks_split_the_heads_that_read_latents(case: Case) -> None:
    config = ModelConfig.from_dir(case.path)
    with torch.device("meta"):
        model = build_model(config, 16)
    assert model_size.num_params(config) == sum(param.numel() for param in model.parameters())
    with pytest.raises(ValueError, match="cannot split num_attention_heads=4 and intermediate"):
        config.check_parallel_size(3)
