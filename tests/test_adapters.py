"""Requests with adapters: greedy output equals transformers' and peft's, in every regime."""

from typing import Any

import pytest
from adapted import OPTIONS, AdaptedCase, audit_slots, make_adapted_case
from reference import HARD, SMALL_POOL, assert_same, audit_at_rest, make_llm

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "two slots": dict(max_loras=2),
    "one slot, one on the host": dict(max_loras=1, max_cpu_loras=1),
    "chunks": dict(max_num_batched_tokens=16),
    "no prefix cache": dict(enable_prefix_caching=False),
    "three at a time": dict(max_num_seqs=3, max_loras=2),
    "small pool, budget 16": HARD,
    "small pool, two slots": dict(SMALL_POOL, max_loras=2),
    "overlap": dict(overlap=True),
    "overlap, small pool, two slots": dict(HARD, overlap=True, max_loras=2, max_cpu_loras=2),
    "mixed": dict(scheduling="mixed", max_num_batched_tokens=60, max_loras=3),
    "n-grams": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    "n-grams in the table": dict(
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        attention_backend="torch",
        overlap=True,
        max_loras=2,
    ),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCase:
    return make_adapted_case(tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_equals_peft_with(name: str, case: AdaptedCase) -> None:
    with make_llm(case.path, **OPTIONS | SCENARIOS[name]) as llm:
        assert_same(case.generate(llm), case.expected)
        assert_same(case.generate(llm), case.expected)
        audit_at_rest(llm)
        audit_slots(llm)
