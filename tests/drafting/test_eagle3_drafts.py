"""An EAGLE-3 head in the engine: output stays the same, and most guesses of a trained one count.

It costs more than 20 seconds: heads are trained, and answers are computed twice.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model, need_gpus
from drafts import drafting_of, make_eager, use_graphs
from heads import make_head
from reference import (
    HARD,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    generate,
    make_case,
    make_llm,
    make_prompts,
)
from safetensors.torch import load_file, save_file
from test_exact_drafts import MODELS, PARAMS, PROMPTS, READERS, all_samples, sampled_params

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.costs import TokenCosts
from nanovllm.drafting.eagle3_config import LAYER_IDS
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.embedded import EMBEDDED_HEAD, EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NUM_DRAFTS = 4
PROBLEMS = sample_problems(120)
REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "overlap": dict(overlap=True),
    "budget 16, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "overlap, three at a time, blocks of 4": dict(
        max_num_seqs=3, overlap=True, kvcache_block_size=4
    ),
    "no prefix cache, small pool": dict(SMALL_POOL, enable_prefix_caching=False),
    "small pool, budget 16": HARD,
    "overlap, small pool, budget 16": dict(HARD, overlap=True),
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "mixed, budget 60": dict(scheduling="mixed", max_num_batched_tokens=60),
    "two ranks, small pool, budget 16": dict(HARD, tensor_parallel_size=2),
    "two ranks, overlap": dict(tensor_parallel_size=2, overlap=True),
}


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


@pytest.fixture(scope="module")
def head_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that guesses badly."""
    return head_of(model_dir, tmp_path_factory.mktemp("head"))


def head_of(model: Path, path: Path, **fields: Any) -> Path:
    """A random head for a model of two layers."""
    return make_head(path, model, **{LAYER_IDS: [0, 1, 0]} | fields)


def make(path: Path | str, head: Path | str, **options: Any) -> LLM:
    """An engine in which all sequences get as many drafts as fit."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
    return make_eager(Path(path), config, **options)


def guesser_of(llm: LLM) -> HeadGuesser:
    guesser = llm.model_runner.shard.drafting
    assert isinstance(guesser, HeadGuesser)
    return guesser


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("name", REGIMES)
def test_wrong_guesses_keep_what_transformers_generates(
    name: str, standard: Case, head_dir: Path
) -> None:
    with make(standard.path, head_dir, **REGIMES[name]) as llm:
        for _ in range(2):  # then from the cache
            assert_same(generate(llm, standard), standard.expected)
            audit_at_rest(llm)
        assert drafting_of(llm).num_drafted > 50


@torch.inference_mode()
def test_a_block_is_copied_with_the_keys_of_the_head() -> None:
    """A sample's own copy of its prompt's last block: without it, the head guesses badly there."""
    with make(EMBEDDED_MODEL, EMBEDDED_HEAD, num_kvcache_blocks=4) as llm:
        pool = llm.model_runner.shard.caches.kv
        (head,) = pool.linked
        for one in (pool, head):
            one.cache.normal_()
        pool.copy(1, 2)
        for one in (pool, head):
            assert torch.equal(one.cache[:, 2], one.cache[:, 1])
            assert not torch.equal(one.cache[:, 3], one.cache[:, 1])


@pytest.fixture(scope="module")
def sums() -> dict[str, list[Any]]:
    """What the embedded model answers without drafts: greedy, and drawn."""
    with make_llm(Path(EMBEDDED_MODEL)) as llm:
        return {name: all_samples(solve(llm, name)) for name in ("greedy", "drawn")}


def solve(llm: LLM, name: str) -> list[Any]:
    """Answers to problems, of which some come after many others, and two samples of some."""
    text = "".join(f"{prompt}{answer}\n" for prompt, answer in PROBLEMS[-20:])
    prompts = [text * (i % 4 == 0) + prompt for i, (prompt, _) in enumerate(PROBLEMS[:100])]
    temperature = 0.0 if name == "greedy" else 1.0
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=12, n=1 + (i % 5 == 0))
        for i in range(len(prompts))
    ]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", REGIMES)
def test_a_trained_head_keeps_every_output_and_is_mostly_right(
    name: str, graphs: bool, sums: dict[str, list[Any]]
) -> None:
    options = REGIMES[name]
    if graphs and "tensor_parallel_size" in options:
        pytest.skip("ranks on a CPU have no graphs")
    if "max_num_batched_tokens" in options:
        options = options | dict(max_num_seqs=3)  # so that the budget has room for drafts
    if "num_kvcache_blocks" in options:
        options = options | dict(num_kvcache_blocks=90)
    with make(EMBEDDED_MODEL, EMBEDDED_HEAD, **options) as llm:
        if graphs:
            use_graphs(llm)
        drafting = drafting_of(llm)
        for kind, expected in sums.items():
            assert all_samples(solve(llm, kind)) == expected
            audit_at_rest(llm)
        tokens_a_step = 1 + sum(drafting.accepted_at) / drafting.num_drafts
        assert drafting.num_drafts > 100 and tokens_a_step > 1.9


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize(
    "options",
    [{}, dict(overlap=True), dict(HARD, overlap=True), dict(tensor_parallel_size=2)],
    ids=str,
)
def test_every_parameter_keeps_every_output(
    options: dict[str, Any], model_dir: Path, head_dir: Path
) -> None:
    """Also of sequences whose tokens the host must know."""
    params = sampled_params([*PARAMS, *READERS])
    with make_llm(model_dir, **options) as plain:
        expected = all_samples(plain.generate(PROMPTS, params, use_tqdm=False))
    with make(model_dir, head_dir, **options) as llm:
        assert all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
        assert drafting_of(llm).num_drafted > 50
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, HARD])
def test_other_models_keep_their_output(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A head attends to all tokens: blocks behind a model's window are kept for it."""
    path = make_model(tmp_path / "model", **MODELS[name])
    case = make_case(path, make_prompts())
    with make(path, head_of(path, tmp_path / "head"), **options) as llm:
        assert llm.scheduler.layout.windows[0] is None
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


def test_a_quantized_cache_is_the_heads_too(sums: dict[str, list[Any]]) -> None:
    with make(
        EMBEDDED_MODEL, EMBEDDED_HEAD, kv_cache_dtype="fp8", attention_backend="torch"
    ) as llm:
        (attention,) = guesser_of(llm).head.attentions
        assert attention.kv.k_scales is not None
        outputs = all_samples(solve(llm, "greedy"))
        same = sum(a == b for a, b in zip(outputs, sums["greedy"], strict=True))
        assert same > 0.9 * len(outputs)
        drafting = drafting_of(llm)
        assert sum(drafting.accepted_at) > drafting.num_drafts


def test_a_head_has_the_types_and_blocks_of_its_model(head_dir: Path, model_dir: Path) -> None:
    with make(model_dir, head_dir, dtype="bfloat16", num_kvcache_blocks=20) as llm:
        shard = llm.model_runner.shard
        guesser = guesser_of(llm)
        assert guesser.pool.cache.shape[1] == shard.caches.kv.cache.shape[1] == 20
        assert guesser.pool.cache.dtype == guesser.kept.states.dtype == torch.bfloat16
        own = [pool.cache.nbytes for pool in (shard.caches.kv, guesser.pool)]
        assert shard.caches.kv.block_bytes == sum(own) / 20 and own[0] == 2 * own[1]
        assert guesser.head.embed_tokens is None
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=8), use_tqdm=False)


def test_an_equal_embedding_is_shared(model_dir: Path, tmp_path: Path) -> None:
    path = head_of(model_dir, tmp_path, own=True)
    with make(model_dir, path) as llm:
        guesser = guesser_of(llm)
        assert guesser.embedding is guesser.head.embed_tokens
    weights = load_file(path / "model.safetensors")
    model = load_file(model_dir / "model.safetensors")
    weights["embed_tokens.weight"] = model["model.embed_tokens.weight"]
    save_file(weights, path / "model.safetensors")
    with make(model_dir, path) as llm:
        guesser, decoder = guesser_of(llm), llm.model_runner.shard.model.model
        assert guesser.embedding is decoder.embed_tokens


def test_random_weights_make_a_head_too(model_dir: Path, head_dir: Path) -> None:
    with make(model_dir, head_dir, load_format="dummy") as llm:
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert drafting_of(llm).num_drafted > 0


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (dict(vocab_size=260), {}, "its vocab_size is 260, the model's is 259"),
        (dict(num_hidden_layers=2), {}, r"config\.json: num_hidden_layers=2 is not supported"),
        (
            dict(num_attention_heads=1, num_key_value_heads=1), dict(tensor_parallel_size=2),
            "tensor_parallel_size=2 cannot split num_attention_heads=1",
        ),
        (dict(draft_vocab_size=41), {}, r"'d2t' has shape \(40,\)"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_an_error_that_names_it(
    fields: dict[str, Any], options: dict[str, Any], message: str, model_dir: Path, head_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = Path(shutil.copytree(head_dir, tmp_path / "head"))
    edit_config(path, **fields)
    with pytest.raises(ValueError, match=message) as raised:
        make(model_dir, path, **options)
    assert str(raised.value).startswith(f"speculative_config, head {str(path)!r}: ")


def test_guesses_add_to_what_drafts_cost(sums: dict[str, list[Any]]) -> None:
    """On a CPU by the bytes of their weights. A trained head is asked, and its drafts count."""
    config = {"method": "eagle3", "model": EMBEDDED_HEAD}
    with make_llm(Path(EMBEDDED_MODEL), speculative_config=config, max_num_seqs=2) as llm:
        costs = drafting_of(llm).costs
        assert isinstance(costs, TokenCosts) and 0.2 < costs._guess < 0.4
        assert all_samples(solve(llm, "greedy")) == sums["greedy"]
        stats = llm.stats()
        assert stats["accepted_tokens"] > 0.25 * stats["drafted_tokens"] > 50
        found = {metric.name: metric for metric in llm.get_metrics()}
        accepted = found["vllm:spec_decode_num_accepted_tokens"]
        assert accepted.value == stats["accepted_tokens"]  # type: ignore[attr-defined]


def test_a_row_that_another_sequence_had_guesses_as_a_new_one() -> None:
    """What the row has kept of that one is not taken for the new one's."""
    accepted = []
    for max_num_seqs in (1, 40):
        with make(EMBEDDED_MODEL, EMBEDDED_HEAD, max_num_seqs=max_num_seqs) as llm:
            for prompt, _ in sample_problems(40):
                llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            accepted.append(llm.stats().accepted_tokens)
    assert accepted[0] == accepted[1] > 50


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), HARD, dict(HARD, scheduling="mixed"), dict(max_num_seqs=3),
     dict(tensor_parallel_size=2)],
    ids=str,
)  # fmt: skip
def test_a_gpu_keeps_every_output(options: dict[str, Any], model_dir: Path, head_dir: Path) -> None:
    """Guesses are part of decode graphs."""
    need_gpus(options.get("tensor_parallel_size", 1))
    gpu: dict[str, Any] = dict(max_num_seqs=4) | options  # with more, few drafts pay
    gpu |= dict(device="cuda", gpu_memory_utilization=0.05, kvcache_block_size=16)
    params = sampled_params()
    for path, head in ((model_dir, head_dir), (Path(EMBEDDED_MODEL), Path(EMBEDDED_HEAD))):
        with make_llm(path, **gpu) as plain:
            expected = plain.generate(PROMPTS, params, use_tqdm=False)
            answers = all_samples(solve(plain, "drawn"))
        with make(path, head, **gpu) as llm:
            drafting = drafting_of(llm)
            drafting.costs = TokenCosts()  # what is measured would not pay
            got = llm.generate(PROMPTS, params, use_tqdm=False)
            assert ends_of(got) == ends_of(expected)
            drafting.num_drafts, drafting.accepted_at = 0, [0] * NUM_DRAFTS
            assert all_samples(solve(llm, "drawn")) == answers
            assert drafting.num_drafts > 20
            if head == Path(EMBEDDED_HEAD):
                assert sum(drafting.accepted_at) > 0.8 * drafting.num_drafts
            audit_at_rest(llm)


def ends_of(outputs: list[RequestOutput]) -> list[Any]:
    """Of each sample, what rounding does not change."""
    return [[(one.token_ids, one.finish_reason) for one in o.outputs] for o in outputs]
