"""Draft heads of models with latent attention: outputs are those without drafts.

test_mtp.py compares their guesses with those of the definition.
"""

from pathlib import Path
from typing import Any

import pytest
from drafts import drafting_of, make_eager
from families import SAMPLES
from families.describe import write
from mtp_heads import add_head
from reference import HARD, audit_at_rest, make_llm, make_prompts
from test_exact_drafts import all_samples

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

MTP: dict[str, Any] = dict(method="mtp", num_speculative_tokens=3)
PROMPTS = make_prompts()[:8]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=12, ignore_eos=True)
    for i in range(len(PROMPTS))
]
REGIMES: dict[str, dict[str, Any]] = {
    "plain PyTorch, blocks of 1": dict(attention_backend="torch", kvcache_block_size=1),
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "two ranks, small pool, budget 16": dict(HARD, tensor_parallel_size=2),
}


def answers_of(llm: LLM) -> Any:
    return all_samples(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head guesses well."""
    path = write(tmp_path_factory.mktemp("latent"), SAMPLES["DeepSeek-V3"])
    return add_head(path, is_good=True)


@pytest.fixture(scope="module")
def expected(good: Path) -> Any:
    with make_llm(good) as llm:
        return answers_of(llm)


@pytest.mark.parametrize("regime", REGIMES)
def test_outputs_are_those_without_drafts(regime: str, good: Path, expected: Any) -> None:
    with make_eager(good, MTP, **REGIMES[regime]) as llm:
        for _ in range(2):  # then from the cache
            assert answers_of(llm) == expected
            audit_at_rest(llm)
        assert all(drafting_of(llm).accepted_at)
        assert llm.stats().accepted_tokens < llm.stats().drafted_tokens


def test_the_option_quantizes_the_head(good: Path) -> None:
    """The layer that expands latents stays plain, as in the model."""
    with make_eager(good, MTP, quantization="int8") as llm:
        head: Any = llm.model_runner.shard.drafting.head  # type: ignore[union-attr]
        (block,) = head.decoder.layers
        assert head.decoder.fc.weight_format.scheme is not None
        assert block.self_attn.q_b_proj.weight_format.scheme is not None
        assert block.self_attn.kv_b_proj.weight_format.scheme is None
        answers_of(llm)
        assert llm.stats().accepted_tokens > 0.2 * llm.stats().drafted_tokens
