"""The embedded model adds numbers correctly under every stress of the engine.

A wrong key, a lost block or a stale row causes a wrong sum. With a random model it would not show.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_scheduler

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.embedded import EMBEDDED_HEAD, EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

PROBLEMS = sample_problems(2000)
SOME = PROBLEMS[:300]
LINES = [f"{prompt}{answer}\n" for prompt, answer in PROBLEMS[-40:]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make_llm(**options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        device="cpu", dtype="float32", cpu_kvcache_gib=0.2, max_model_len=512
    )
    return LLM(EMBEDDED_MODEL, **defaults | options)


def solve(llm: LLM, problems: list[tuple[str, str]], context: str = "") -> list[RequestOutput]:
    """Answer the problems after a context; 99.5% must be right and end with a stop token."""
    outputs = llm.generate([context + prompt for prompt, _ in problems], GREEDY, use_tqdm=False)
    wrong = [
        f"{prompt}{out['text']!r} ({out['finish_reason']}), expected {answer}"
        for (prompt, answer), out in zip(problems, outputs, strict=True)
        if out["text"] != answer or out["finish_reason"] != "stop"
    ]
    assert len(wrong) <= 0.005 * len(problems), f"{len(wrong)} wrong, the first: {wrong[:3]}"
    return outputs


def test_sample_problems_are_distinct_and_correct() -> None:
    assert len(set(PROBLEMS)) == 2000 and PROBLEMS[:300] == sample_problems(300)
    for prompt, answer in PROBLEMS:
        first, second = prompt.removesuffix("=").split("+")
        assert int(first) + int(second) == int(answer)


def test_the_head_is_small_and_for_this_model() -> None:
    path = Path(EMBEDDED_HEAD)
    assert sum(file.stat().st_size for file in path.iterdir()) < 500_000
    head, model = HeadConfig.from_dir(path), ModelConfig.from_dir(Path(EMBEDDED_MODEL))
    assert sorted(head.taps(model)) == [1, 2, 3]


def test_the_model_adds() -> None:
    with make_llm() as llm:
        outputs = solve(llm, PROBLEMS)
    assert len({out["text"] for out in outputs}) > 500
    for out in outputs:
        assert llm.tokenizer.decode(out["token_ids"][:-1]) == out["text"]
        assert out["token_ids"][-1] in llm.eos_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_seqs=3),
        dict(max_num_seqs=1, kvcache_block_size=1),
        dict(max_num_batched_tokens=5),
        dict(max_num_batched_tokens=33, kvcache_block_size=4),
        dict(kvcache_block_size=256),
        dict(enable_prefix_caching=False, kvcache_block_size=2),
        dict(dtype="bfloat16"),
    ],
)
def test_sums_are_right_with(options: dict[str, Any]) -> None:
    with make_llm(**options) as llm:
        solve(llm, SOME)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kvcache_block_size=1),
        dict(kvcache_block_size=4, max_num_batched_tokens=20),
        dict(max_num_batched_tokens=64, max_num_seqs=16),
    ],
)
def test_sums_are_right_after_a_shared_context(options: dict[str, Any]) -> None:
    """The context is ten solved lines, computed once and then found in the prefix cache."""
    context = "".join(LINES[:10])
    with make_llm(**options) as llm:
        solve(llm, SOME[:1], context)
        outputs = solve(llm, SOME, context)
    block_size = llm.scheduler.block_size
    num_shared = len(llm.tokenizer.encode(context))
    assert num_shared >= 60
    for out in outputs:
        assert out["num_cached_tokens"] >= num_shared // block_size * block_size


def test_sums_are_right_after_different_contexts() -> None:
    """Prompts of very different lengths run together, in chunks."""
    with make_llm(max_num_batched_tokens=50, kvcache_block_size=4) as llm:
        prompts = [
            "".join(LINES[i % 40 : i % 40 + i % 13]) + prompt for i, (prompt, _) in enumerate(SOME)
        ]
        problems = [(prompt, answer) for prompt, (_, answer) in zip(prompts, SOME, strict=True)]
        solve(llm, problems)


@pytest.mark.parametrize(
    "options",
    [
        dict(kvcache_block_size=1, num_kvcache_blocks=64),
        dict(kvcache_block_size=1, num_kvcache_blocks=64, enable_prefix_caching=False),
        dict(kvcache_block_size=2, num_kvcache_blocks=24),
        dict(kvcache_block_size=1, num_kvcache_blocks=64, max_num_batched_tokens=30),
    ],
)
def test_sums_are_right_after_preemptions(options: dict[str, Any]) -> None:
    with make_llm(max_model_len=32, **options) as llm:
        solve(llm, SOME)
        assert llm.scheduler.num_preemptions >= 100
        audit_scheduler(llm.scheduler)


def test_sums_are_right_with_graphs() -> None:
    with make_llm(max_num_seqs=37, kvcache_block_size=4) as llm:
        graphs = llm.model_runner.shard.graphs = llm.model_runner.shard.decode_graphs(
            llm.config.max_num_running
        )
        graphs.logits.zero_()
        solve(llm, SOME)
        assert graphs.logits.any(), "the graphs were never used"


def test_hot_requests_do_not_affect_greedy_ones() -> None:
    """Requests at temperature 5 get sums wrong; greedy ones in the same batches do not."""
    hot = SamplingParams(temperature=5.0, max_tokens=12, seed=0)
    with make_llm(max_num_seqs=50) as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in SOME for _ in range(2)], [GREEDY, hot] * 300, use_tqdm=False
        )
    answers = [answer for _, answer in SOME]
    assert sum(o["text"] == a for o, a in zip(outputs[::2], answers, strict=True)) >= 298
    assert sum(o["text"] == a for o, a in zip(outputs[1::2], answers, strict=True)) < 150


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_right_on_the_device(dtype: str) -> None:
    """With the backend that `auto` selects there."""
    options = dict(device="cuda", num_kvcache_blocks=2000, dtype=dtype)
    with make_llm(**options) as llm:
        solve(llm, PROBLEMS)
        solve(llm, SOME, "".join(LINES[:10]))
    torch.cuda.empty_cache()
