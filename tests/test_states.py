"""Models with states: what their states must survive, beyond `test_families.py`.

Chunks around the sizes of kernels' tiles, prefixes that end at a checkpoint or between two, samples
of one prompt, wrong drafts, preemptions on two ranks. It costs more than 20 seconds: there are many
combinations.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Adversary, sizes_of_short_prefills, speculate, use_graphs
from families import SAMPLES, spaces
from families.describe import write
from reference import (
    HARD,
    MIN_MARGIN,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    generate,
    load_reference,
    make_case,
    make_llm,
    make_prompts,
    make_some_prompts,
)

from nanovllm import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NAMES = [
    "Mamba 2, one group", "Granite 4", "Falcon-H1", "Nemotron 3", "Qwen3.5", "OLMo Hybrid rotated",
]  # fmt: skip
TWO_RANKS = dict(tensor_parallel_size=2)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    sample = SAMPLES[request.param]
    path = write(tmp_path_factory.mktemp("states"), sample)
    return make_case(path, make_some_prompts(), padded=sample.padded)


def has_kv(case: Case) -> bool:
    return "mamba2" not in (case.path / "config.json").read_text()


@pytest.mark.parametrize("chunk", [20, 300])
def test_padded_prefills_leave_the_same_states(chunk: int, case: Case) -> None:
    if not has_kv(case):
        pytest.skip("prefills of models without attention are no graphs")
    with make_llm(case.path, attention_backend="torch", max_num_batched_tokens=chunk) as llm:
        use_graphs(llm)
        sizes = sizes_of_short_prefills(llm)
        for _ in range(2):  # then from checkpoints
            assert_same(generate(llm, case), case.expected)
        assert sizes
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.08)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65])
def test_chunks_leave_the_same_states(chunk: int, ranks: int, case: Case) -> None:
    options = dict(max_num_batched_tokens=chunk, max_num_seqs=chunk)
    with make_llm(case.path, tensor_parallel_size=ranks, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.17)
@pytest.mark.slow
@pytest.mark.parametrize("options", [TWO_RANKS, dict(scheduling="mixed", overlap=True)])
def test_preempted_sequences_find_their_states(options: dict[str, Any], case: Case) -> None:
    chunk = dict(max_num_batched_tokens=60)
    with make_llm(case.path, **SMALL_POOL, **chunk, **options) as llm:
        for _ in range(2):  # the second time with checkpoints of the first one
            assert_same(generate(llm, case), case.expected)
            audit_at_rest(llm)
        assert llm.scheduler.num_preemptions >= 3 or not has_kv(case)


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_prefixes_end_at_a_checkpoint_or_between_two(ranks: int, case: Case) -> None:
    """A hit begins at the last checkpoint that is not behind the common tokens."""
    long = [token for prompt in case.prompts if len(prompt) > 60 for token in prompt][:480]
    lengths = [6, 64, 255, 256, 257, 300, 477, 480]
    prompts = [[*long[:length], 7, 8] for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = {}
    for cached in (False, True):
        options = dict(enable_prefix_caching=cached, tensor_parallel_size=ranks)
        with make_llm(case.path, kvcache_block_size=4, num_kvcache_blocks=900, **options) as llm:
            llm.generate([long], params, use_tqdm=False)
            found = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            outputs[cached] = [out.token_ids for out in found]
            if not cached:
                continue
            assert llm.scheduler.layout.states is not None
            interval = llm.scheduler.layout.states.interval
            for length, out in zip(lengths, found, strict=True):
                hit = out["num_cached_tokens"]  # prompts leave checkpoints where they differ, too
                assert length // interval * interval <= hit <= length and hit % 4 == 0
                assert length < 470 or hit >= 476
    assert outputs[True] == outputs[False]


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("options", [HARD, dict(TWO_RANKS, scheduling="mixed")])
def test_samples_of_a_prompt_have_their_own_states(options: dict[str, Any], case: Case) -> None:
    hot = SamplingParams(temperature=1.0, n=3, seed=3, max_tokens=16, ignore_eos=True)
    with make_llm(case.path, **options) as llm:
        together = llm.generate(case.prompts[:6], hot, use_tqdm=False)
        again = [llm.generate([p], hot, use_tqdm=False)[0] for p in case.prompts[:6]]
        for one, other in zip(together, again, strict=True):
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
            assert len({tuple(o.token_ids) for o in one.outputs}) > 1
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.1)
@pytest.mark.parametrize("options", [{}, dict(HARD, overlap=True), TWO_RANKS])
@pytest.mark.parametrize("backend", ["auto", "torch"])  # drafts of the host, and of the device
def test_drafts_right_and_wrong_leave_no_state(
    backend: str, options: dict[str, Any], case: Case
) -> None:
    outputs = {(tuple(p), 0): t for p, t in zip(case.prompts, case.tokens, strict=True)}
    config = dict(method="ngram", num_speculative_tokens=5)
    drafts: dict[str, Any] = dict(speculative_config=config, attention_backend=backend)
    drafts |= dict(cpu_kvcache_gib=0.2)  # for the states after each draft
    with make_llm(case.path, **drafts, **options) as llm:
        speculate(llm, Adversary(11, 259, outputs))
        assert_same(generate(llm, case), case.expected)
        stats = llm.stats()
        # Where other ranks guess, too, the drafts are those of n-grams, of which few are right.
        least = 0 if backend == "torch" and options is TWO_RANKS else 20
        assert least < stats.accepted_tokens < 0.9 * stats.drafted_tokens
        audit_at_rest(llm)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("Mamba 2", dict(time_step_limit=[0.4, 0.9])),
        ("Granite 4, dense", dict(time_step_limit=[0.4, 0.9])),
        ("Nemotron-H", dict(time_step_min=0.5)),
    ],
)
def test_time_steps_have_limits(name: str, limits: dict[str, Any], tmp_path: Path) -> None:
    """As in transformers' pass over a whole text. Its steps of one token leave the limits out."""
    sample = spaces.SAMPLES[name]
    path = write(tmp_path, replace(sample, fields={**sample.fields, **limits}))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [prompt for prompt in make_prompts() if 4 < len(prompt) < 70][:12]
    with make_llm(path) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    model = load_reference(path)
    for prompt, out in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *out.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        best = logits.topk(2).values
        is_decisive = best[:, 0] - best[:, 1] > MIN_MARGIN
        wrong = logits.argmax(-1) != torch.tensor(out.token_ids)
        assert not bool((wrong & is_decisive).any())


@pytest.mark.slow
def test_adapters_fit_the_groups_that_ranks_share(tmp_path: Path) -> None:
    """With one group on two ranks, both have its rows of the projection's adapter."""
    from adapted import OPTIONS, with_adapters

    path = write(tmp_path / "model", spaces.SAMPLES["Falcon-H1"])
    adapted = with_adapters(path, tmp_path, 4, ["all but out_proj"])
    with make_llm(path, **OPTIONS, **TWO_RANKS) as llm:
        assert_same(adapted.generate(llm), adapted.expected)
