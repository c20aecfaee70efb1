"""Families from outside of the package with states: their tokens equal those of a plain loop.

The loop has no cache and no batch: it computes each sequence anew for every token. It costs more
than 20 seconds: two models go through all regimes.
"""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import state_family
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer
from drafts import Adversary, Eager, drafting_of, make_eager, speculate, use_graphs
from heads import make_head
from reference import (
    HARD,
    NUM_STEPS,
    SMALL_POOL,
    Case,
    as_fp8,
    assert_same,
    audit_at_rest,
    check_aborts,
    check_hits,
    generate,
    make_llm,
    make_some_prompts,
)
from safetensors.torch import load_file, save_file
from strangers import loop_case, registered

from nanovllm import SamplingParams
from nanovllm.command.info import describe
from nanovllm.metrics import Gauge
from nanovllm.models import model_size
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model
from nanovllm.utils.resources import GIB

pytestmark = pytest.mark.usefixtures("one_thread", "crowded", "known")

NAME = "MixedForCausalLM"
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
KINDS = {
    "beside attention": ["linear", "attention", "linear"],
    "alone": ["linear", "linear"],
}
NGRAMS: dict[str, Any] = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))
SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "chunks of 7": dict(max_num_batched_tokens=7),
    "blocks of 1, chunks of 16": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "no prefix cache": dict(enable_prefix_caching=False),
    "small pool": SMALL_POOL,
    "small pool, chunks of 16": HARD,
    "small pool, overlap": dict(HARD, overlap=True),
    "mixed, overlap": dict(scheduling="mixed", max_num_batched_tokens=60, overlap=True),
    "mixed, small pool": dict(SMALL_POOL, scheduling="mixed", max_num_batched_tokens=60),
    "n-grams": NGRAMS,
    "n-grams in the table": dict(NGRAMS, attention_backend="torch"),
    "n-grams in the table, small pool, overlap": dict(
        HARD, **NGRAMS, attention_backend="torch", overlap=True
    ),
    "n-grams, small pool, overlap": dict(HARD, **NGRAMS, overlap=True),
    "two ranks": dict(tensor_parallel_size=2, max_num_batched_tokens=64),
    "two ranks, small pool": dict(HARD, tensor_parallel_size=2),
    "sequences of 3 at most": dict(max_num_seqs=3),
}


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    with registered(NAME, state_family.FAMILY):
        yield


def write_model(path: Path, kinds: list[str]) -> None:
    generator = torch.Generator().manual_seed(3)
    config = dict(
        architectures=[NAME], vocab_size=259, hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=len(kinds), num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=DIM, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=257,
        dtype="float32", kinds=kinds,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (259, HIDDEN), "norm": (HIDDEN,)}
    for index, kind in enumerate(kinds):
        if kind == "attention":
            sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
            layer = {f"self_attn.{name}_proj": (size, HIDDEN) for name, size in sizes.items()}
            layer["self_attn.o_proj"] = (HIDDEN, HEADS * DIM)
        else:
            layer = {f"linear.{name}_proj": (state_family.SIZE, HIDDEN) for name in "qkv"}
            layer["linear.o_proj"] = (HIDDEN, state_family.SIZE)
            layer["linear.gate"] = (state_family.HEADS, HIDDEN)
            shapes[f"layers.{index}.linear.conv"] = (
                3, state_family.HEADS, state_family.DIM, state_family.WIDTH,
            )  # fmt: skip
        layer |= {
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=generator)
        * {1: 0.3, 2: 0.15}.get(len(shape), 0.5)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    byte_tokenizer().save_pretrained(path)


class Loop:
    """The model in plain PyTorch, for one sequence at a time."""

    def __init__(self, path: Path, fp8: bool = False) -> None:
        self.fp8 = fp8
        weights = load_file(path / "model.safetensors")
        self.weights = {
            name.removeprefix("model.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
        }
        self.kinds = json.loads((path / "config.json").read_text())["kinds"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weights[name]

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = (
            (x @ self.weights[f"{name}.self_attn.{n}_proj"].T).view(len(x), -1, DIM).transpose(0, 1)
            for n in "qkv"
        )
        angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(DIM // 2) * 2 / DIM)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.complex(*h.split(DIM // 2, -1)) * turn).mT.flatten(-2)
            for h in (q, k)
        )  # fmt: skip
        if self.fp8:
            k, v = as_fp8(k), as_fp8(v)
        k, v = (h.repeat_interleave(HEADS // KV_HEADS, 0) for h in (k, v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return attended.transpose(0, 1).flatten(1) @ self.weights[f"{name}.self_attn.o_proj"].T

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """All tokens at once: each reads those before it, as far as the gates let them through."""
        width, heads, dim = state_family.WIDTH, state_family.HEADS, state_family.DIM
        gates = F.logsigmoid(x @ self.weights[f"{name}.linear.gate"].T).cumsum(0).T
        u = torch.stack([x @ self.weights[f"{name}.linear.{n}_proj"].T for n in "qkv"], 1)
        windows = F.pad(u, (0, 0, 0, 0, width - 1, 0)).view(-1, 3, heads, dim).unfold(0, width, 1)
        convolved = F.silu((windows * self.weights[f"{name}.linear.conv"]).sum(-1))
        q, k, v = convolved.permute(1, 2, 0, 3)
        passed = (gates[:, :, None] - gates[:, None, :]).exp().tril()
        mixed = ((q @ k.mT) * passed @ v).transpose(0, 1).flatten(1)
        return mixed @ self.weights[f"{name}.linear.o_proj"].T

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of the token after each of `ids`."""
        x = self.weights["embed_tokens"][ids]
        for index, kind in enumerate(self.kinds):
            name = f"layers.{index}"
            mix = self.attention if kind == "attention" else self.linear
            x = x + mix(self.norm(x, f"{name}.input_layernorm"), name)
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up, down = (self.weights[f"{name}.mlp.{n}_proj"] for n in ("gate", "up", "down"))
            x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
        return self.norm(x, "norm") @ self.weights["embed_tokens"].T


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("states")
    write_model(path, KINDS[request.param])
    loop = Loop(path)
    return loop_case(path, lambda ids: loop.logits(ids)[-1], make_some_prompts())


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_stranger_with_states_equals_the_loop_with(name: str, case: Case) -> None:
    with make_llm(case.path, **SCENARIOS[name]) as llm:
        assert_same(generate(llm, case), case.expected)
        if "small pool" in name and llm.scheduler.layout.windows:
            assert llm.scheduler.num_preemptions >= 10
        audit_at_rest(llm)


ON_A_DEVICE: list[dict[str, Any]] = [
    {}, dict(enforce_eager=True), dict(attention_backend="torch"), HARD, dict(scheduling="mixed"),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("options", ON_A_DEVICE)
def test_a_stranger_with_states_equals_the_loop_on_a_device(
    options: dict[str, Any], case: Case
) -> None:
    with make_llm(case.path, device="cuda", max_num_seqs=64, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), SMALL_POOL])
def test_drafts_of_a_device_leave_no_state(options: dict[str, Any], case: Case) -> None:
    """Few tokens are allowed, so that texts repeat themselves and many drafts are right."""
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[1, 2, 3]
    )
    prompts = [[1, 2, 3, 4, 5, 6] * 3, [7, 8, 9] * 4, [5, 6, 5, 6, 5]]
    outputs = []
    for device, more in (("cpu", {}), ("cuda", dict(options, **NGRAMS))):
        with make_llm(case.path, device=device, max_num_seqs=8, **more) as llm:
            if device == "cuda":
                drafting_of(llm)._make_pace = Eager
            outputs.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
            stats = llm.stats()
    assert outputs[0] == outputs[1]
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, overlap=True, scheduling="mixed")])
def test_a_heads_wrong_guesses_leave_no_state(
    options: dict[str, Any], case: Case, tmp_path: Path
) -> None:
    """An EAGLE-3 head keeps KV of its own in the blocks that the model has."""
    head = make_head(tmp_path, case.path, eagle_aux_hidden_state_layer_ids=[0, 1, 0])
    config = dict(method="eagle3", model=str(head), num_speculative_tokens=3)
    if "attention" not in Loop(case.path).kinds:
        with pytest.raises(ValueError, match="a head needs a model with attention layers"):
            make_eager(case.path, config)
        return
    with make_eager(case.path, config, **options) as llm:
        for _ in range(2):
            assert_same(generate(llm, case), case.expected)
            audit_at_rest(llm)
        assert llm.stats().drafted_tokens > 50


@pytest.fixture(scope="module")
def case_in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("fp8")
    write_model(path, KINDS["beside attention"])
    loop = Loop(path, fp8=True)
    return loop_case(path, lambda ids: loop.logits(ids)[-1], make_some_prompts())


@pytest.mark.parametrize("options", [{}, HARD])
def test_states_beside_kv_in_fp8(options: dict[str, Any], case_in_fp8: Case) -> None:
    """Halfway between two codes either is right: a few prompts may differ for that."""
    with make_llm(case_in_fp8.path, kv_cache_dtype="fp8", **options) as llm:
        for _ in range(2):
            outputs = generate(llm, case_in_fp8)
            pairs = zip(outputs, case_in_fp8.expected, strict=True)
            assert sum(out.token_ids != tokens for out, tokens in pairs) <= len(outputs) // 15
            audit_at_rest(llm)


def test_states_are_freed_with_the_engine(case: Case) -> None:
    """Nothing of a closed engine that is still referenced keeps a part of its steps."""
    llm = make_llm(case.path)
    generate(llm, case)
    states = weakref.ref(llm.model_runner.shard.caches.states)
    gc.disable()
    try:
        llm.close()
        assert states() is None
    finally:
        gc.enable()


def test_statistics_count_states(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    from nanovllm.server.metrics import metrics_text

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(case.path, max_num_seqs=4, kvcache_block_size=4) as llm:
        has_kv = bool(llm.scheduler.layout.windows)
        assert (llm.stats().num_blocks > 0) == has_kv and llm.stats().cache_usage == 0
        for prompt in ([1] * 10, [2, 3]):
            llm.add_request(prompt, params)
        llm.step()
        stats = llm.stats()
        assert (stats.state_slots_used, stats.checkpoints_used) == (2, 1)
        assert stats.num_state_slots > 4
        share = 4 / stats.num_blocks if has_kv else 2 / stats.num_state_slots
        assert stats.cache_usage == share
        gauges = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Gauge)}
        assert gauges["vllm:kv_cache_usage_perc"] == stats.cache_usage
        shown = metrics_text(llm.get_metrics(), "m").decode()
        of_states = {"slots": stats.num_state_slots, "slots_used": 2, "checkpoints": 1}
        for name, value in of_states.items():
            assert gauges[f"nanovllm:state_{name}"] == value
            assert f'nanovllm:state_{name}{{model_name="m"}} {value}.0\n' in shown
        while not llm.is_finished():
            llm.step()
        assert (llm.stats().state_slots_used, llm.stats().checkpoints_used) == (0, 3)
        llm.generate([[1, 2, 3]], params)
    assert ("KV 0%" if has_kv else "states 0%") in capsys.readouterr().err


@pytest.mark.parametrize("cached", [True, False])
def test_without_kv_blocks_do_not_limit_what_runs(cached: bool, tmp_path: Path) -> None:
    """Neither their number, nor memory that no token takes: there must be some for the states."""
    write_model(tmp_path, KINDS["alone"])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = dict(max_num_seqs=5, enable_prefix_caching=cached)
    with make_llm(tmp_path, num_kvcache_blocks=2, **options) as llm:
        for index in range(5):
            llm.add_request([index] * 50, params)
        llm.step()
        assert llm.stats().num_running == 5 and " 0 KV blocks" in repr(llm)
        states = llm.model_runner.shard.caches.num_bytes(5).before / GIB
    with make_llm(tmp_path, cpu_kvcache_gib=1.001 * states, **options) as llm:
        assert len(llm.generate([1, 2, 3], params, use_tqdm=False)[0].token_ids) == 40
    with pytest.raises(ValueError, match=r"MiB for the states of sequences, those of 5 take"):
        make_llm(tmp_path, cpu_kvcache_gib=0.999 * states, **options)


def test_layers_that_keep_states_must_say_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_family.MixedConfig, "layer_shape", ModelConfig.layer_shape)
    with pytest.raises(ValueError, match=r"layer 0 of MixedForCausalLM keeps State.*says KeysAnd"):
        make_llm(case.path)


def test_without_room_for_a_checkpoint_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, KINDS["alone"])
    with make_llm(tmp_path, num_kvcache_blocks=2, kvcache_block_size=16):
        assert "no room for checkpoints" in caplog.text


def test_without_kv_there_is_none_in_fp8(tmp_path: Path) -> None:
    write_model(tmp_path, KINDS["alone"])
    with pytest.raises(ValueError, match="needs keys and values; this model's layers keep states"):
        make_llm(tmp_path, kv_cache_dtype="fp8")


def test_prefix_hits_restore_states(case: Case) -> None:
    """In a pool that has room for all checkpoints: at the end of each prompt's last full block."""
    check_hits(case, kvcache_block_size=4, max_num_batched_tokens=64)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, dict(overlap=True), dict(NGRAMS, overlap=True)])
@pytest.mark.parametrize("backend", ["auto", "torch"])  # drafts of the host, and of the device
def test_turns_of_a_conversation_go_on_at_the_last_full_block(
    backend: str, options: dict[str, Any], case: Case
) -> None:
    """And nearly always there with drafts of a device: two steps may overwrite what they guess."""
    guesses = backend == "torch" and "speculative_config" in options
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, allowed_token_ids=[1, 2, 3]
    )
    pools = dict(kvcache_block_size=16, num_kvcache_blocks=256)
    text, prompts = [1, 2, 3] * 12, []
    with make_llm(case.path, attention_backend=backend, **pools, **options) as llm:
        if "speculative_config" in options:
            drafting_of(llm)._make_pace = Eager
        found, outputs = [], []
        for turn in range(6):
            prompts.append([*text])
            (out,) = llm.generate([text], params, use_tqdm=False)
            found.append(out["num_cached_tokens"] == (len(text) - 2 - turn) // 16 * 16)
            outputs.append(out["token_ids"])
            text += [*out["token_ids"], *range(5, 7 + turn)]
        audit_at_rest(llm)
        assert not guesses or llm.stats().accepted_tokens > 20
    assert sum(found[1:]) >= (4 if guesses else 5)
    with make_llm(case.path, enable_prefix_caching=False) as llm:
        assert [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)] == outputs


@pytest.mark.parametrize("options", [HARD, dict(scheduling="mixed", kvcache_block_size=4)])
def test_forks_have_their_own_states(options: dict[str, Any], case: Case) -> None:
    with make_llm(case.path, **options) as llm:
        params = [SamplingParams(temperature=0, n=3, max_tokens=NUM_STEPS, ignore_eos=True)]
        outputs = llm.generate(case.prompts[:12], params * 12, use_tqdm=False)
        for output, tokens in zip(outputs, case.tokens, strict=False):
            assert [one.token_ids for one in output.outputs] == [tokens] * 3
        hot = SamplingParams(temperature=1.0, n=3, seed=3, max_tokens=20, ignore_eos=True)
        together = llm.generate(case.prompts[:6], hot, use_tqdm=False)
        again = [llm.generate([p], hot, use_tqdm=False)[0] for p in case.prompts[:6]]
        for one, other in zip(together, again, strict=True):
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        audit_at_rest(llm)


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, overlap=True)])
@pytest.mark.parametrize("backend", ["auto", "torch"])  # drafts of the host, and of the device
def test_rejected_drafts_leave_no_state(backend: str, options: dict[str, Any], case: Case) -> None:
    """Every other one of the drafts is wrong."""
    outputs = {(tuple(p), 0): t for p, t in zip(case.prompts, case.tokens, strict=True)}
    config = dict(method="ngram", num_speculative_tokens=5)
    with make_llm(
        case.path, speculative_config=config, attention_backend=backend, **options
    ) as llm:
        speculate(llm, Adversary(11, 259, outputs))
        for graphs in (False, True):
            if graphs and backend == "torch":
                use_graphs(llm)
            assert_same(generate(llm, case), case.expected)
        stats = llm.stats()
        assert 20 < stats.accepted_tokens < 0.9 * stats.drafted_tokens
        audit_at_rest(llm)


def test_aborted_requests_leave_correct_states(case: Case) -> None:
    check_aborts(case, **SMALL_POOL, max_num_batched_tokens=32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_stream_and_sleep_keep_the_output(device: str, case: Case) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    with make_llm(case.path, device=device, enable_sleep_mode=True, **SMALL_POOL) as llm:
        tokens: dict[int, list[int]] = {}
        for event in llm.stream(case.prompts[:3], params):
            tokens.setdefault(event.index, []).extend(event.token_ids)
        assert [tokens[index] for index in range(3)] == case.tokens[:3]
        assert_same(generate(llm, case), case.expected)
        llm.sleep()
        llm.wake_up()
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


def test_a_stranger_with_states_is_described_before_it_is_built(case: Case) -> None:
    config = ModelConfig.from_dir(case.path)
    with torch.device("meta"):
        model = build_model(config, 16)
    count = sum(param.numel() for param in model.parameters())
    assert model_size.num_params(config) == count
    assert describe({"model": str(case.path), "device": "cpu"})["num_parameters"] == count
    with pytest.raises(ValueError, match="linear_heads=4"):
        config.check_parallel_size(3)
