"""What transformers makes of prompts, computed once for each model, and how to compare with it.

All prompts go left-padded into one batch, one token a step. A prompt whose two best logits come
closer than `MIN_MARGIN` somewhere decides nothing (two right programs may differ there) and is left
out; five of six always remain.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from audits import audit_scheduler
from conftest import LogitRecorder
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from nanovllm import LLM, SamplingParams
from nanovllm.engine.schedule.batch import Batch
from nanovllm.outputs import RequestOutput

NUM_STEPS = 24
MIN_MARGIN = 1e-4
MAX_LOGIT_ERROR = 1e-4

# A pool that the longest request just fits in, and a budget that most prompts exceed.
SMALL_POOL: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=56)
HARD: dict[str, Any] = dict(SMALL_POOL, max_num_batched_tokens=16)

DRAFTS = dict(method="ngram", num_speculative_tokens=3)
# Options with which every family of models gives the same tokens.
REGIMES: dict[str, dict[str, Any]] = {
    "plain PyTorch": dict(attention_backend="torch"),
    "chunks of 7": dict(max_num_batched_tokens=7),
    "blocks of 1, chunks of 16": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "no prefix cache": dict(enable_prefix_caching=False),
    "small pool": SMALL_POOL,
    "small pool, chunks of 16": HARD,
    "small pool, overlap": dict(HARD, overlap=True),
    "mixed": dict(scheduling="mixed", max_num_batched_tokens=60),
    "n-grams": dict(speculative_config=DRAFTS),
    "n-grams, small pool": dict(HARD, speculative_config=DRAFTS),
    "two ranks": dict(tensor_parallel_size=2, max_num_batched_tokens=64),
}


@dataclass(frozen=True)
class Case:
    """A model, prompts, and what transformers makes of them."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]  # NUM_STEPS for each prompt
    logits: torch.Tensor  # [prompts, NUM_STEPS, vocab]

    @property
    def params(self) -> list[SamplingParams]:
        """Greedy, of different lengths, so that the batch changes all the time."""
        return [
            SamplingParams(temperature=0, max_tokens=NUM_STEPS - 3 * index % 11, ignore_eos=True)
            for index in range(len(self.prompts))
        ]

    @property
    def expected(self) -> list[list[int]]:
        """The reference's tokens, as far as `params` let them come."""
        return [t[: p.max_tokens] for t, p in zip(self.tokens, self.params, strict=True)]


def make_prompts() -> list[list[int]]:
    """Lengths 1 to 200, a third of them on a common prefix, some of them twice."""
    edges = [1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 199, 200]
    after = [0, 1, 2, 3, 4, 8, 15, 16, 17, 30, 40, 64, 64, 100]
    return _prompts(edges, 16, after, [95, 50, 48, 16], [21, 30, 40, 50])


def make_some_prompts() -> list[list[int]]:
    """Half as many, with half the tokens: for many models, each of which gets all of them."""
    edges = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 200]
    return _prompts(edges, 5, [0, 1, 3, 8, 16, 30, 64], [95, 50], [15, 25])


def _prompts(
    edges: list[int], others: int, after: list[int], parts: list[int], twice: list[int]
) -> list[list[int]]:
    """Of the lengths `edges`, `others` of any, then lengths `after` a prefix, and `parts` of it."""
    rng = random.Random(7)

    def random_ids(length: int) -> list[int]:
        return [rng.randrange(259) for _ in range(length)]

    prompts = [random_ids(length) for length in edges]
    prompts += [random_ids(rng.randrange(1, 100)) for _ in range(others)]
    prefix = random_ids(96)
    prompts += [prefix + random_ids(n) for n in after]
    prompts += [prefix[:n] for n in parts]
    prompts += [list(prompts[i]) for i in twice]
    rng.shuffle(prompts)
    return prompts


def make_crowd() -> list[list[int]]:
    """Short prompts that start at once and grow out of the pool; `make_prompts` come after them."""
    rng = random.Random(8)
    return [
        [rng.randrange(8) for _ in range(1 + i % 4)] if i % 2 else rng.choices(range(259), k=3)
        for i in range(140)
    ]


def load_reference(path: Path) -> Any:
    """transformers' model with its weights in float32, whatever they are stored in."""
    return auto_class(path).from_pretrained(path).float().eval()


def auto_class(path: Path) -> Any:
    """The class of transformers that loads a model: some are not among its decoders."""
    known = type(AutoConfig.from_pretrained(path)) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def as_fp8(x: torch.Tensor) -> torch.Tensor:
    """What an fp8 cache holds of heads [..., D]: e4m3 codes times a scale.

    The scale is the least bfloat16 with which no code is larger than e4m3's largest number.
    """
    exact = x.abs().amax(-1, keepdim=True) / 448
    scale = exact.bfloat16()
    above = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    scale = torch.where(scale < exact, above, scale).float()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class Fp8Cache(DynamicCache):
    """transformers' cache with keys and values that went through `as_fp8`."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(as_fp8(key_states), as_fp8(value_states), *args, **kwargs)


@torch.inference_mode()
def reference_logits(
    model: Any,
    prompts: list[list[int]],
    fp8: bool = False,
    narrow: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> torch.Tensor:
    """Logits [prompts, NUM_STEPS, vocab] of the greedy continuations, after `narrow`."""
    longest = max(map(len, prompts))
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache: Any = Fp8Cache(config=model.config) if fp8 else None
    steps, name = [], "past_key_values"
    own = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft's
    if "cache_params" in inspect.signature(own.forward).parameters:
        name = "cache_params"  # of models that keep only states
    for _ in range(NUM_STEPS):
        out = model(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}
        )
        cache = out[name]
        steps.append(narrow(out.logits[:, -1]))
        ids = steps[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.stack(steps, dim=1)


def make_case(path: Path, prompts: list[list[int]], fp8: bool = False, padded: bool = True) -> Case:
    """Compute the reference of a model directory, and keep the prompts that decide something.

    Unless `padded`, each prompt is a batch of its own.
    """
    return _case(path, [prompts] if padded else [[prompt] for prompt in prompts], fp8)


def make_crowd_case(path: Path, fp8: bool = False, every: int = 1) -> Case:
    """The crowd and the prompts after it, all or some of them.

    They are two batches, or most of one would be padding.
    """
    return _case(path, [make_crowd()[::every], make_prompts()[::every]], fp8)


def _case(path: Path, batches: list[list[list[int]]], fp8: bool) -> Case:
    model, prompts = load_reference(path), [prompt for batch in batches for prompt in batch]
    logits = torch.cat([reference_logits(model, batch, fp8) for batch in batches])
    kept = decisive(logits)
    logits = logits[kept]
    return Case(path, [prompts[index] for index in kept], logits.argmax(-1).tolist(), logits)


def decisive(logits: torch.Tensor, least: int | None = None) -> list[int]:
    """The prompts, by their logits [prompts, steps, vocab], that have no near-ties.

    Their tokens are more than `least` different ones, by default 50 or five of six prompts.
    """
    best = logits.topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]).amin(dim=1)
    kept = [index for index, margin in enumerate(margins.tolist()) if margin > MIN_MARGIN]
    most = 5 * len(logits) // 6
    assert len(kept) >= most, "too many near-ties: choose another seed"
    least = min(50, most) if least is None else least
    assert len(logits[kept].argmax(-1).unique()) > least, "the model says always the same"
    return kept


def make_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
    return LLM(path, **defaults | options)


def generate(llm: LLM, case: Case) -> list[RequestOutput]:
    return llm.generate(case.prompts, case.params, use_tqdm=False)


def assert_same(outputs: list[RequestOutput], expected: list[list[int]]) -> None:
    wrong = [i for i, out in enumerate(outputs) if out["token_ids"] != expected[i]]
    assert len(outputs) == len(expected) and not wrong, (
        f"{len(wrong)} of {len(expected)} differ; the first is prompt {wrong[0]}:"
        f" {outputs[wrong[0]]['token_ids']} != {expected[wrong[0]]}"
    )


def run_to_end(llm: LLM) -> list[RequestOutput]:
    """Step until all requests finish; fail if that takes too many steps."""
    outputs = []
    for _ in range(2000):
        if llm.is_finished():
            return outputs
        outputs += llm.step()
    raise AssertionError("requests never finish")


def audit_at_rest(llm: LLM) -> None:
    audit_scheduler(llm.scheduler)
    manager = llm.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks, "a finished request kept a block"


def check_logits(case: Case, most: float = MAX_LOGIT_ERROR, **options: Any) -> None:
    with make_llm(case.path, **options) as llm:
        recorder = LogitRecorder(llm)
        outputs = generate(llm, case)
        assert_same(outputs, case.expected)
        for index, out in enumerate(outputs):
            seen = recorder.of(out)
            error = (seen - case.logits[index, : len(seen)]).abs().amax()
            assert error < most, f"prompt {index}: logits differ by {error}"


def check_preemptions(case: Case, least: int, **options: Any) -> None:
    """A crowd of requests keeps its output, with at least that many preemptions."""
    crowd = make_crowd_case(case.path)
    with make_llm(case.path, **options) as llm:
        assert_same(generate(llm, crowd), crowd.expected)
        assert llm.scheduler.num_preemptions >= least
        audit_at_rest(llm)


def check_hits(case: Case, **options: Any) -> None:
    """All full blocks of the prompts, but their last token, are hits of a second call."""
    with make_llm(case.path, **options) as llm:
        size = llm.config.kvcache_block_size
        for cached in (False, True):
            outputs = generate(llm, case)
            assert_same(outputs, case.expected)
            if cached:
                expected = [(len(prompt) - 1) // size * size for prompt in case.prompts]
                assert [out["num_cached_tokens"] for out in outputs] == expected
            audit_at_rest(llm)


def check_samples(case: Case, **options: Any) -> None:
    """Three greedy samples of each of the longest prompts are equal."""
    order = sorted(range(len(case.prompts)), key=lambda index: -len(case.prompts[index]))[:20]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=3)] * len(order)
    with make_llm(case.path, **options) as llm:
        outputs = llm.generate([case.prompts[index] for index in order], params, use_tqdm=False)
        for index, out in zip(order, outputs, strict=True):
            assert [sample["token_ids"] for sample in out["outputs"]] == [case.tokens[index]] * 3
        audit_at_rest(llm)


def check_freed_blocks(case: Case, **options: Any) -> None:
    """Free blocks are filled with NaN before every step; NaN times a weight of 0 is NaN, too."""
    with make_llm(case.path, enable_prefix_caching=False, **options) as llm:
        begin, pool = llm.model_runner.begin, llm.model_runner.shard.caches.kv

        def poisoning(batch: Batch) -> Any:
            free = list(llm.scheduler.block_manager.free_queue)
            with torch.inference_mode():
                assert pool.cache is not None
                pool.cache[:, free] = torch.nan
            return begin(batch)

        llm.model_runner.begin = poisoning  # type: ignore[method-assign]
        assert_same(generate(llm, case), case.expected)


def check_aborts(case: Case, **options: Any) -> None:
    """Requests that are aborted in the middle leave what later ones can read."""
    with make_llm(case.path, **options) as llm:
        ids = [llm.add_request(p, s) for p, s in zip(case.prompts, case.params, strict=True)]
        finished: set[int] = set()
        for _ in range(25):
            finished |= {out["request_id"] for out in llm.step()}
        for request_id in set(ids) - finished:
            llm.abort_request(request_id)
        audit_at_rest(llm)
        assert_same(generate(llm, case), case.expected)
