"""An EAGLE-3 head in the engine: output stays the same, and most guesses of a trained one count."""

from pathlib import Path
from typing import Any

import pytest
from drafts import Eager
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
from test_exact_drafts import all_samples

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_HEAD, EMBEDDED_MODEL, sample_problems
from nanovllm.engine.speculative.speculator import Speculator
from nanovllm.models.eagle3_config import LAYER_IDS

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
    llm = make_llm(Path(path), **options | {"speculative_config": config})
    speculator_of(llm)._make_pace = Eager
    return llm


def speculator_of(llm: LLM) -> Speculator:
    assert llm.scheduler.speculator is not None
    return llm.scheduler.speculator


def use_graphs(llm: LLM) -> None:
    """Compute decode steps as in graphs: padded, with block tables of full width."""
    shard = llm.model_runner.shard
    shard.graphs = shard.decode_graphs(llm.config.max_num_running)


@pytest.mark.parametrize("name", REGIMES)
def test_wrong_guesses_keep_what_transformers_generates(
    name: str, standard: Case, head_dir: Path
) -> None:
    with make(standard.path, head_dir, **REGIMES[name]) as llm:
        for _ in range(2):  # then from the cache
            assert_same(generate(llm, standard), standard.expected)
            audit_at_rest(llm)
        assert speculator_of(llm).num_drafted > 50


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
        speculator = speculator_of(llm)
        for kind, expected in sums.items():
            assert all_samples(solve(llm, kind)) == expected
            audit_at_rest(llm)
        tokens_a_step = 1 + sum(speculator.accepted_at) / speculator.num_drafts
        assert speculator.num_drafts > 100 and tokens_a_step > 2.2
