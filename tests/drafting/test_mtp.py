"""The draft head in a checkpoint: its guesses are those of its definition, outputs stay the same.

It costs more than 20 seconds: answers are computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from drafts import drafting_of, make_eager, use_graphs
from families import SAMPLES
from families.describe import write
from mtp_heads import FILE, Definition, add_head
from reference import HARD, SMALL_POOL, audit_at_rest, make_llm, make_prompts
from safetensors.torch import load_file, save_file
from test_exact_drafts import PARAMS, READERS, all_samples

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.drafting.mtp_head import MtpHead
from nanovllm.engine.schedule.batch import Size
from nanovllm.kernels.plain.read_table import TableState

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

FAMILIES = [name for name in SAMPLES if name.startswith(("Qwen3.5", "Qwen3-Next"))]
MTP: dict[str, Any] = dict(method="mtp", num_speculative_tokens=3)
PROMPTS = make_prompts()[:20]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = [
    SamplingParams(**dict(max_tokens=20) | (PARAMS + READERS)[i % 20] | dict(seed=i))
    for i in range(len(PROMPTS))
]
REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "overlap": dict(overlap=True),
    "budget 16, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "three at a time, blocks of 4, overlap": dict(
        max_num_seqs=3, overlap=True, kvcache_block_size=4
    ),
    "no prefix cache, small pool": dict(SMALL_POOL, enable_prefix_caching=False),
    "small pool, budget 16": HARD,
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "two ranks, small pool, budget 16": dict(HARD, tensor_parallel_size=2),
    "two ranks, overlap": dict(tensor_parallel_size=2, overlap=True),
}


@dataclass(frozen=True)
class Answers:
    """A checkpoint with a head, and what it answers without drafts."""

    path: Path
    greedy: list[Any]
    sampled: list[Any]


def answers_of(llm: LLM) -> tuple[list[Any], list[Any]]:
    return tuple(
        all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (GREEDY, SAMPLED)
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Answers]:
    """Makes a model of a family, with a head that is good or bad, when it is first needed."""
    made: dict[tuple[str, bool], Answers] = {}

    def make(name: str, is_good: bool) -> Answers:
        if (name, is_good) not in made:
            path = write(tmp_path_factory.mktemp("mtp"), SAMPLES[name])
            add_head(path, is_good=is_good)
            with make_llm(path) as llm:
                made[name, is_good] = Answers(path, *answers_of(llm))
        return made[name, is_good]

    return make


class Recorder:
    """Records what a head guesses after how many tokens, of which the last one is known."""

    def __init__(self, llm: LLM) -> None:
        self.guessed: list[tuple[int, int, list[int]]] = []
        guesser: Any = llm.model_runner.shard.drafting
        self._guess = guesser.guess
        guesser.guess = self.guess

    def guess(self, table: TableState, size: Size) -> None:
        self._guess(table, size)
        for row in table.batch[: size.num_seqs].tolist():
            length = int(table.lengths[row])
            if size.num_queries > 1 and length >= 0:
                drafts = table.drafts.tokens[row, : size.num_queries - 1].tolist()
                known = [token for token in drafts if token >= 0]
                self.guessed.append((length + 1, int(table.tokens[row]), known))


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    *((name, False, {}) for name in FAMILIES),
    ("Qwen3.5", True, {}),
    ("Qwen3.5", False, dict(max_num_batched_tokens=7, attention_backend="torch")),
    ("Qwen3.5", True, dict(SMALL_POOL, max_num_batched_tokens=16, num_kvcache_blocks=14)),
    ("Qwen3.5", False, dict(SMALL_POOL, max_num_batched_tokens=16, num_kvcache_blocks=14)),
    ("Qwen3.5 experts", False, dict(tensor_parallel_size=2)),
]


@pytest.mark.parametrize(("name", "is_good", "options"), CASES, ids=str)
def test_drafts_are_those_of_the_definition(
    name: str, is_good: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of prompts in chunks, after preemptions, and after any number of accepted drafts.

    Without cached prefixes: the last position of one may be another sequence's.
    """
    path = add_head(write(tmp_path / "model", SAMPLES[name]), is_good=is_good)
    prompts = [[7 * i % (251 - n) for i in range(n)] for n in (2, 5, 20, 33)]
    with make_eager(path, MTP, enable_prefix_caching=False, **options) as llm:
        recorder = Recorder(llm)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        if "num_kvcache_blocks" in options:
            assert llm.scheduler.num_preemptions > 0
    texts = [p + out.token_ids for p, out in zip(prompts, outputs, strict=True)]
    definition = Definition(path, tmp_path / "other")
    seen: set[int] = set()
    for length, last, drafts in recorder.guessed:
        known = [t[:length] for t in texts if len(t) >= length and t[length - 1] == last]
        expected = [definition.drafts(tokens, 3)[: len(drafts)] for tokens in known]
        assert drafts in expected
        seen |= {*drafts}
    assert len(recorder.guessed) > 20 and len(seen) > 10


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("is_good", [False, True])
@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next"])
def test_outputs_are_those_without_drafts(
    name: str, is_good: bool, regime: str, models: Callable[[str, bool], Answers]
) -> None:
    """Greedy and drawn ones, of states that wrong and right drafts have gone through."""
    model = models(name, is_good)
    with make_eager(model.path, MTP, **REGIMES[regime]) as llm:
        for _ in range(2):  # then from the cache
            assert answers_of(llm) == (model.greedy, model.sampled)
            audit_at_rest(llm)
        at = drafting_of(llm).accepted_at
        assert llm.stats().drafted_tokens > 50
        if is_good:
            assert all(at) and llm.stats().accepted_tokens < llm.stats().drafted_tokens


@pytest.mark.parametrize("number", [1, 2, 7])
def test_any_number_of_drafts_keeps_the_output(
    number: int, models: Callable[[str, bool], Answers]
) -> None:
    model = models("Qwen3.5", True)
    config = MTP | dict(num_speculative_tokens=number)
    with make_eager(model.path, config, attention_backend="torch") as llm:
        use_graphs(llm)
        assert answers_of(llm) == (model.greedy, model.sampled)
        assert drafting_of(llm).accepted_at[number - 1] > 0
        assert llm.model_runner.shard.caches.slots_per_sequence == 1 + number
