"""One order of sums on a CPU: a request has the same tokens and log-probabilities in any steps.

They are equal bit for bit, alone and among others, however its tokens are divided into steps. The
kernels' own tests are in kernels/: this one is for all that lies between them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapted import OPTIONS as WITH_ADAPTERS
from adapter_files import make_adapter
from conftest import PRODUCTS, make_model
from families import SAMPLES
from families.describe import write
from reference import DRAFTS, HARD

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.kernels.cpu import attention
from nanovllm.structured_outputs import StructuredOutputsParams

pytestmark = [pytest.mark.usefixtures("compiler", "one_thread")]

Answer = list[list[tuple[int, float]]]  # of each sample: tokens and log-probabilities


@dataclass(frozen=True)
class Model:
    """How a model is written, and the options of its engine."""

    write: Callable[[Path], Path]
    options: dict[str, Any]
    refuses: tuple[str, ...] = ()  # regimes
    adapters: int = 0


def of_family(name: str, *refuses: str, **options: Any) -> Model:
    return Model(partial(write, sample=SAMPLES[name]), options, refuses)


STATES = partial(of_family, "Qwen3.5", "draft model")


MODELS = {
    "dense": Model(make_model, dict(dtype="bfloat16")),
    "dense, float32": Model(make_model, dict(dtype="float32")),
    "codes of keys": Model(make_model, dict(dtype="bfloat16", kv_cache_dtype="fp8")),
    "codes of keys, windows": of_family("Gemma 3", dtype="bfloat16", kv_cache_dtype="fp8"),
    "codes of keys, states": STATES(dtype="float32", kv_cache_dtype="fp8"),
    "weights of 8 bits": Model(make_model, dict(dtype="bfloat16", quantization="int8")),
    "weights of 4 bits": Model(make_model, dict(dtype="bfloat16", quantization="int4")),
    "states": STATES(dtype="bfloat16"),
    "states, float32": STATES(dtype="float32"),
    "windows": of_family("Gemma 3", dtype="bfloat16"),
    "windows, float32": of_family("Gemma 3", dtype="float32"),
    "experts": Model(partial(make_model, family="Qwen3Moe"), dict(dtype="bfloat16")),
    "experts, float32": Model(partial(make_model, family="Qwen3Moe"), dict(dtype="float32")),
    "adapters": Model(make_model, dict(dtype="bfloat16") | WITH_ADAPTERS, adapters=2),
    "adapters, float32": Model(make_model, dict(dtype="float32") | WITH_ADAPTERS, adapters=2),
}

REGIMES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 1": dict(max_num_batched_tokens=1),
    "chunks of 7": dict(max_num_batched_tokens=7),
    "chunks of 64": dict(max_num_batched_tokens=64),
    "mixed": dict(scheduling="mixed", max_num_batched_tokens=60),
    "prefix hits": dict(enable_prefix_caching=True, kvcache_block_size=4),
    "small pool": HARD,
    "small pool, overlap": dict(HARD, overlap=True),
    "n-grams": dict(speculative_config=DRAFTS),
    "draft model": dict(speculative_config=dict(method="draft_model", num_speculative_tokens=3)),
}
NUM_REQUESTS = 13


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some with a common beginning; greedy, sampled, forked and constrained ones."""
    chosen = random.Random(3)
    common = chosen.choices(range(8), k=70)
    prompts = [chosen.choices(range(259), k=k) for k in (1, 2, 31, 33, 64, 100, 150)]
    prompts += [common + chosen.choices(range(259), k=k) for k in (0, 1, 30, 90)]
    prompts += [common[:40], [5, 6, 7] * 20]
    params = [
        SamplingParams(
            temperature=(0, 0.8, 1.3)[index % 3], seed=index, max_tokens=12 + index % 5, logprobs=2,
            n=2 if index % 4 == 3 else 1, ignore_eos=True,
            top_p=0.9 if index % 5 == 4 else 1.0,
            structured_outputs=(
                StructuredOutputsParams(regex="[a-z ]{30}") if index % 6 == 5 else None
            ),
        )
        for index in range(len(prompts))
    ]  # fmt: skip
    return prompts, params


@dataclass
class Written:
    """A model in a directory, the adapters of requests in turn, and the answers to each alone."""

    path: Path
    model: Model
    adapters: list[LoRARequest | None]
    expected: list[Answer]


def answers(llm: LLM, case: Written, indices: Sequence[int]) -> list[Answer]:
    """The answers to the requests with these numbers."""
    prompts, params = requests()
    outputs = llm.generate(
        [prompts[i] for i in indices], [params[i] for i in indices], False,
        [case.adapters[i % len(case.adapters)] for i in indices],
    )  # fmt: skip
    return [
        [
            [(token, entry.logprob) for one in sample.logprobs for token, entry in one.items()]
            for sample in output.outputs
        ]
        for output in outputs
    ]


def engine(case: Written, **options: Any) -> LLM:
    usual: dict[str, Any] = dict(
        device="cpu", attention_backend="cpu", max_model_len=224, enable_prefix_caching=False,
        cpu_kvcache_gib=0.02,
    )  # fmt: skip
    if "num_kvcache_blocks" in options:
        del usual["cpu_kvcache_gib"]
    return LLM(case.path, **usual | case.model.options | options)


@pytest.fixture(scope="module")
def written() -> dict[str, Written]:
    return {}


@pytest.fixture
def case(
    name: str, written: dict[str, Written], tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Written:  # fmt: skip
    """A model, and the answers to each request alone."""
    PRODUCTS["tiled"].use(monkeypatch)
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)
    if name not in written:
        folder, model = tmp_path_factory.mktemp("model"), MODELS[name]
        path = model.write(folder / "model")
        made = [make_adapter(path, folder / str(n), seed=n) for n in range(model.adapters)]
        adapters = [LoRARequest(str(n), n + 1, str(at)) for n, at in enumerate(made)]
        case = written[name] = Written(path, model, [*adapters, None], [])
        with engine(case) as llm:
            case.expected += [answers(llm, case, [index])[0] for index in range(NUM_REQUESTS)]
    return written[name]


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODELS["dense"], {}),
        (MODELS["experts"], dict(enable_expert_parallel=True)),
        (of_family("Olmo2", dtype="bfloat16"), {}),  # a norm over the heads of all ranks
    ],
    ids=["dense", "whole experts", "norms of all heads"],
)
def test_ranks_add_up_in_one_order(
    model: Model, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many: prompts in chunks, alone and together."""
    PRODUCTS["tiled"].use(monkeypatch)
    case = Written(model.write(tmp_path / "model"), model, [None], [])
    some = [1, 4, 5, 6, 9]
    options |= dict(tensor_parallel_size=2, batch_invariant=True)
    with engine(case, **options) as llm:
        alone = [answers(llm, case, [index])[0] for index in some]
        assert answers(llm, case, some) == alone
    with engine(case, max_num_batched_tokens=7, **options) as llm:
        assert answers(llm, case, some) == alone


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_do_not_change_an_answer(name: str, regime: str, case: Written) -> None:
    """Fails if any kernel's order of sums depends on what else is in a step."""
    if regime in case.model.refuses:
        pytest.skip("this model cannot be a draft model")
    options = dict(REGIMES[regime])
    if regime == "draft model":
        options["speculative_config"] = options["speculative_config"] | dict(model=str(case.path))
    order = random.Random(regime).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    with engine(case, **options) as llm:
        for _ in range(2 if regime == "prefix hits" else 1):
            got = dict(zip(order, answers(llm, case, order), strict=True))
            assert [i for i in order if got[i] != case.expected[i]] == []
        if "small pool" in regime and name.startswith("dense"):
            assert llm.scheduler.num_preemptions > 0
