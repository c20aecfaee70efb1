"""Requests with adapters: greedy output equals transformers' and peft's, in every regime.

It costs more than 20 seconds: PEFT computes each adapter's answers.
"""

import dataclasses
import gc
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import OPTIONS, AdaptedCase, audit_slots, make_adapted_case, make_experts_case
from adapter_files import EVERY_LINEAR, MOE, make_adapter, peft_logits
from conftest import make_model, need_gpus
from drafts import make_eager, sizes_of_short_prefills, use_graphs
from heads import make_head
from reference import HARD, SMALL_POOL, assert_same, audit_at_rest, make_llm
from waiting import wait_until

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.drafting.eagle3_config import LAYER_IDS
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NGRAMS = {"method": "ngram", "num_speculative_tokens": 4}
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
    "n-grams": dict(speculative_config=NGRAMS),
    "n-grams in the table": dict(
        speculative_config=NGRAMS, attention_backend="torch", overlap=True, max_loras=2
    ),
}
QUICK = ("plain PyTorch", "one slot, one on the host", "overlap, small pool, two slots", "n-grams")
LINEAR = ("linear", "odd", "attention")
MODELS: dict[str, dict[str, Any]] = {
    "tied embeddings": dict(tie_word_embeddings=True, names=LINEAR),
    "Llama, biased": dict(family="Llama", attention_bias=True, mlp_bias=True, names=LINEAR),
    "Qwen2": dict(family="Qwen2", names=LINEAR),
    "experts": dict(
        family="Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
        names=("attention",),
    ),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCase:
    return make_adapted_case(tmp_path_factory.mktemp("adapted"), every=2)


def adapted_llm(case: AdaptedCase, **options: Any) -> LLM:
    return make_llm(case.path, **OPTIONS | options)


def check(llm: LLM, case: AdaptedCase) -> None:
    """Twice, as the second time prefixes are known."""
    for _ in range(2):
        assert_same(case.generate(llm), case.expected)
    audit_at_rest(llm)
    audit_slots(llm)


@pytest.mark.sampled(share=0.4)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS],
)
def test_greedy_equals_peft_with(name: str, case: AdaptedCase) -> None:
    with adapted_llm(case, **SCENARIOS[name]) as llm:
        check(llm, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_peft_of(name: str, tmp_path: Path) -> None:
    case = make_adapted_case(tmp_path, every=3, **MODELS[name])
    with adapted_llm(case, max_loras=2) as llm:
        check(llm, case)


def test_padded_steps_equal_peft(case: AdaptedCase) -> None:
    """Short prefills and decode steps in the sizes of graphs, with adapters and without."""
    with adapted_llm(case, attention_backend="torch", max_num_batched_tokens=60) as llm:
        use_graphs(llm)
        sizes = sizes_of_short_prefills(llm)
        check(llm, case)
    assert {size.is_marked for size in sizes} == {False, True}


@pytest.mark.slow
def test_greedy_equals_peft_on_two_ranks(case: AdaptedCase) -> None:
    """Each rank reads adapters that its memory does not have."""
    few = SMALL_POOL | dict(max_num_batched_tokens=48)
    with adapted_llm(case, tensor_parallel_size=2, max_loras=2, max_cpu_loras=2, **few) as llm:
        check(llm, case)


@pytest.fixture(scope="module")
def experts_case(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCase:
    return make_experts_case(tmp_path_factory.mktemp("experts"), every=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {}, dict(SMALL_POOL, overlap=True, max_num_batched_tokens=48, max_loras=2),
        dict(tensor_parallel_size=2, max_loras=2),
        dict(tensor_parallel_size=2, enable_expert_parallel=True),
    ],
    ids=["all at once", "overlap, two slots", "two ranks", "whole experts on ranks"],
)  # fmt: skip
def test_adapters_of_experts_equal_merged_ones(
    options: dict[str, Any], experts_case: AdaptedCase
) -> None:
    with adapted_llm(experts_case, **options) as llm:
        check(llm, experts_case)


@pytest.fixture(scope="module")
def fused_case(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCase:
    return make_adapted_case(
        tmp_path_factory.mktemp("fused"), every=3, names=("linear", "odd", "experts"), **MOE
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(max_loras=2),
        pytest.param(dict(tensor_parallel_size=2, max_loras=2), marks=pytest.mark.slow),
        pytest.param(
            dict(tensor_parallel_size=2, enable_expert_parallel=True), marks=pytest.mark.slow
        ),
    ],
    ids=["one rank", "two ranks", "whole experts on ranks"],
)
def test_adapters_of_all_experts_equal_peft(
    options: dict[str, Any], fused_case: AdaptedCase
) -> None:
    """PEFT saves all experts of a layer as one tensor; the rank of gate_up_proj is doubled."""
    with adapted_llm(fused_case, **options) as llm:
        check(llm, fused_case)


@pytest.mark.slow
def test_a_draft_model_without_adapters_keeps_the_output(case: AdaptedCase) -> None:
    draft = {"model": str(case.path), "num_speculative_tokens": 3}
    with make_eager(case.path, draft, **OPTIONS | dict(max_loras=2)) as llm:
        check(llm, case)
        assert llm.stats().accepted_tokens > 0


@pytest.mark.slow
def test_a_head_that_drafts_keeps_the_output(case: AdaptedCase, tmp_path: Path) -> None:
    """An EAGLE-3 head reads hidden states that the adapters have changed."""
    head = make_head(tmp_path, case.path, **{LAYER_IDS: [0, 1, 0]})
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with make_eager(case.path, drafts, **OPTIONS | dict(max_loras=2)) as llm:
        check(llm, case)
        assert llm.stats().drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_regimes_agree_on_quantized_weights(quantization: str, case: AdaptedCase) -> None:
    """One sequence at a time, and all of them with fewer slots than adapters."""
    linear = [one for one in case.adapters if one.lora_name in LINEAR]
    prompts, adapters = case.prompts[:8], [None, *linear] * 2
    asked: dict[str, Any] = dict(quantization=quantization)
    with adapted_llm(case, max_num_seqs=1, **asked) as llm:
        expected = llm.generate(prompts, GREEDY, False, adapters)
        plain = llm.generate(prompts, GREEDY, False)
    assert [a["token_ids"] != b["token_ids"] for a, b in zip(plain, expected, strict=True)] == [
        adapter is not None for adapter in adapters
    ]
    with adapted_llm(case, max_loras=2, **asked) as llm:
        outputs = llm.generate(prompts, GREEDY, False, adapters)
        assert_same(outputs, [output["token_ids"] for output in expected])


@pytest.mark.parametrize("options", [{}, dict(HARD, overlap=True)], ids=["plain", "hard"])
def test_without_an_adapter_requests_are_the_same_to_the_bit(
    options: dict[str, Any], case: AdaptedCase
) -> None:
    """As with an engine without adapters, log probabilities too."""
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    with make_llm(case.path, **options) as llm:
        expected = llm.generate(case.prompts[:12], params, False)
    with adapted_llm(case, **options) as llm:
        outputs = llm.generate(case.prompts[:12], params, False)
        case.generate(llm)
        later = llm.generate(case.prompts[:12], params, False)
    for output, again, want in zip(outputs, later, expected, strict=True):
        for key in ("token_ids", "logprobs", "prompt_logprobs"):
            assert output[key] == again[key] == want[key]


def test_prefixes_are_shared_by_requests_with_the_same_adapter_alone(case: AdaptedCase) -> None:
    first, second = case.adapters[:2]
    same = LoRARequest("another name", first.lora_path)
    options = dict(kvcache_block_size=8)
    with adapted_llm(case, **options) as llm:
        cached = [
            llm.generate([PROMPT], GREEDY, False, adapter)[0]["num_cached_tokens"]
            for adapter in (first, second, None, first, same, second, None)
        ]
    assert cached == [0, 0, 0, 32, 32, 32, 32]


def test_an_adapter_whose_files_changed_is_another(case: AdaptedCase, tmp_path: Path) -> None:
    """Nothing of the old one is used: not its tensors, not its prefixes."""
    old, new = case.adapters[0], case.adapters[2]
    path = tmp_path / "adapter"
    shutil.copytree(old.lora_path, path)
    request = LoRARequest("own", path)
    with adapted_llm(case, kvcache_block_size=8) as llm:
        before = llm.generate([PROMPT], GREEDY, False, request)[0]
        shutil.rmtree(path)
        shutil.copytree(new.lora_path, path)
        after = llm.generate([PROMPT], GREEDY, False, request)[0]
        expected = llm.generate([PROMPT] * 2, GREEDY, False, [old, new])
    assert_same([before, after], [output["token_ids"] for output in expected])
    assert before["token_ids"] != after["token_ids"]
    assert after["num_cached_tokens"] == 0


def test_samples_and_log_probabilities_of_an_adapter(case: AdaptedCase) -> None:
    """Forks share their adapter; the prompt's log probabilities are those of its chunks."""
    adapter = case.adapters[3]
    params = SamplingParams(
        n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    with adapted_llm(case) as llm:
        one = llm.generate([PROMPT], params, False, adapter)[0]
        plain = llm.generate([PROMPT], params, False)[0]
    with adapted_llm(case, max_num_batched_tokens=16, max_loras=1) as llm:
        other = llm.generate([PROMPT], params, False, adapter)[0]
    assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]
    assert [s.token_ids for s in one.outputs] != [s.token_ids for s in plain.outputs]
    for ours, theirs in zip(one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True):
        for mine, same in zip(ours, theirs, strict=True):
            assert mine["token_id"] == same["token_id"]
            assert mine["logprob"] == pytest.approx(same["logprob"], abs=1e-3)
    assert one["prompt_logprobs"] != plain["prompt_logprobs"]


def test_forks_and_prompts_of_an_adapter_for_the_head(case: AdaptedCase) -> None:
    """Forks draw from their own adapter's logits, and prompts are reported by them."""
    prompts, requests = case.prompts[:10], case.requests[:10]
    params = dataclasses.replace(GREEDY, n=2, prompt_logprobs=0)
    with adapted_llm(case, max_num_batched_tokens=48) as llm:
        outputs = llm.generate(prompts, params, False, requests)
    for output, prompt, request, tokens in zip(
        outputs, prompts, requests, case.tokens, strict=False
    ):
        assert [sample.token_ids for sample in output.outputs] == [tokens[:8]] * 2
        adapter = None if request is None else Path(request.path)
        expected = peft_logits(case.path, adapter, prompt).log_softmax(-1)
        for place, entries in enumerate(output["prompt_logprobs"][1:], start=1):
            want = expected[place - 1, prompt[place]].item()
            assert entries[0]["logprob"] == pytest.approx(want, abs=1e-3)


def test_vectors_with_an_adapter(case: AdaptedCase) -> None:
    first = case.adapters[0]
    with adapted_llm(case, max_loras=1) as llm:
        mixed = llm.embed([PROMPT] * 3, use_tqdm=False, lora_request=[first, None, first])
        alone = llm.embed([PROMPT], use_tqdm=False)[0]
        states = llm.encode([PROMPT], "all", use_tqdm=False, lora_request=first)[0]
        with pytest.raises(ValueError, match="lora_request must be one or as many as prompts"):
            llm.embed([PROMPT] * 2, use_tqdm=False, lora_request=[first])
    vectors = torch.tensor([output["embedding"] for output in mixed])
    assert torch.allclose(vectors[0], vectors[2], atol=1e-6)
    assert torch.allclose(vectors[1], torch.tensor(alone["embedding"]), atol=1e-6)
    assert (vectors[0] - vectors[1]).abs().amax() > 1e-2
    last = torch.nn.functional.normalize(torch.as_tensor(states.outputs.data)[-1], dim=0)
    assert torch.allclose(last, vectors[0], atol=1e-5)


def test_a_call_looks_at_the_files_of_an_adapter_once(
    case: AdaptedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each prompt: that takes longer than everything else that is checked."""
    first, second = case.adapters[:2]
    same = LoRARequest(first.name, first.path)
    given = [first, second, None, same, second, first]
    one = dataclasses.replace(GREEDY, max_tokens=1)
    with adapted_llm(case) as llm:
        assert llm.adapters is not None
        seen: list[LoRARequest] = []
        accept = llm.adapters.store.accept
        monkeypatch.setattr(
            llm.adapters.store, "accept", lambda request: seen.append(request) or accept(request)
        )
        for call in (
            lambda: llm.generate([PROMPT] * 6, one, False, given),
            lambda: llm.embed([PROMPT] * 6, use_tqdm=False, lora_request=given),
        ):
            seen.clear()
            call()
            assert seen == [first, second]


def test_streams_and_priorities_with_adapters(case: AdaptedCase) -> None:
    prompts, requests = case.prompts[:10], case.requests[:10]
    expected = [tokens[:8] for tokens in case.tokens[:10]]
    with adapted_llm(case, max_loras=1, max_num_seqs=2) as llm:
        tokens: list[list[int]] = [[] for _ in prompts]
        for event in llm.stream(prompts, GREEDY, lora_request=requests):
            tokens[event.index] += event.token_ids
        assert tokens == expected
        ids = [
            llm.add_request(
                prompt, dataclasses.replace(GREEDY, priority=-i % 3),
                request,
            )
            for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        ]  # fmt: skip
        outputs = {}
        while not llm.is_finished():
            for output in llm.step():
                outputs[output["request_id"]] = output["token_ids"]
            audit_slots(llm)
        assert [outputs[number] for number in ids] == expected


def test_aborted_requests_release_their_slot(case: AdaptedCase) -> None:
    first, second = case.adapters[:2]
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with adapted_llm(case, max_loras=1) as llm:
        holder = llm.add_request(PROMPT, long, first)
        llm.add_request(case.prompts[0], GREEDY, second)
        for _ in range(3):
            llm.step()
        assert [seq.request_id for seq in llm.scheduler.running] == [holder]
        llm.abort_request(holder)
        for _ in range(20):
            if llm.is_finished():
                break
            llm.step()
        assert llm.is_finished()
        audit_at_rest(llm)


def test_files_that_vanish_end_the_requests_that_wait_for_them(
    case: AdaptedCase, tmp_path: Path
) -> None:
    """With an error; other requests go on, and the engine can be used again."""
    path = tmp_path / "adapter"
    shutil.copytree(case.adapters[0].path, path)
    with adapted_llm(case, max_loras=1, max_cpu_loras=1) as llm:
        lost = llm.add_request(PROMPT, GREEDY, LoRARequest("lost", path))
        kept = llm.add_request(PROMPT, GREEDY, case.adapters[1])  # in place of the first one
        shutil.rmtree(path)
        outputs: dict[int, RequestOutput] = {}

        def finish() -> bool:
            for output in llm.step():
                outputs[output["request_id"]] = output
            return llm.is_finished()

        wait_until("the requests have no end", finish)
        assert outputs[lost].outputs[0].finish_reason == "error"
        assert re.match(r"lora_request: .*adapter", str(outputs[lost].outputs[0].stop_reason))
        expected = llm.generate([PROMPT], GREEDY, False, case.adapters[1])[0]
        assert outputs[kept]["token_ids"] == expected["token_ids"]
        check(llm, case)


def test_an_interrupted_engine_fills_its_slots_again(
    case: AdaptedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapted_llm(case, max_loras=2) as llm:
        wait = llm.model_runner.wait
        countdown = iter(range(6))

        def interrupt(launched: Any) -> Any:
            if next(countdown, None) is None:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return wait(launched)

        monkeypatch.setattr(llm.model_runner, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.generate(llm)
        check(llm, case)


@pytest.mark.slow
def test_adapters_come_and_go_without_growth(
    case: AdaptedCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New directories, evictions and reloads: objects, slots and threads stay as they are."""
    one = dataclasses.replace(GREEDY, max_tokens=1)
    sources = [adapter.path for adapter in case.adapters[:3]]
    with adapted_llm(case, max_loras=2, max_cpu_loras=2, kvcache_block_size=8) as llm:
        assert llm.adapters is not None
        store, reads = llm.adapters.store, 0

        def read(path: Path, number: int, read: Callable[..., Any] = store._read) -> Any:
            nonlocal reads
            reads += 1
            return read(path, number)

        monkeypatch.setattr(store, "_read", read)

        def use(number: int) -> None:
            path = shutil.copytree(sources[number % 3], tmp_path / str(number))
            requests = [LoRARequest("new", path), *case.adapters[: 1 + number % 3]]
            llm.generate([[1, 2, 3]] * len(requests), one, False, requests)
            shutil.rmtree(path)

        for number in range(30):
            use(number)
        gc.collect()
        threads, objects = threading.active_count(), len(gc.get_objects())
        for number in range(30, 130):
            use(number)
        gc.collect()
        assert threading.active_count() == threads
        assert len(gc.get_objects()) < objects + 1000, "an adapter has 57 objects at least"
        assert len(store.tensors) <= 2
        assert reads > 130
        audit_slots(llm)
        audit_at_rest(llm)


def test_adapters_survive_sleep(case: AdaptedCase) -> None:
    with adapted_llm(case, enable_sleep_mode=True) as llm:
        assert_same(case.generate(llm), case.expected)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert_same(case.generate(llm), case.expected)


def test_a_bad_adapter_is_an_error_that_changes_nothing(case: AdaptedCase, tmp_path: Path) -> None:
    good = case.adapters[0]
    truncated = tmp_path / "truncated"
    shutil.copytree(good.lora_path, truncated)
    file = truncated / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    large = make_adapter(case.path, tmp_path / "large", r=9)
    other = adapter_of_a_larger_model(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with adapted_llm(case, max_loras=1, max_cpu_loras=1) as llm:
        for path, words in (
            (tmp_path / "none", "none"), (empty, "adapter_config.json"),
            (truncated, "adapter_model.safetensors"), (large, "max_lora_rank"), (other, "shape"),
            ("user/adapter", "lora_path must be a local directory, got 'user/adapter'; download"
             r" adapters of the Hugging Face Hub first \(`hf download user/adapter --local-dir"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=words) as caught:
                llm.generate([PROMPT] * 2, GREEDY, False, [good, LoRARequest("bad", path)])
            assert "prompts[1]: lora_request 'bad'" in str(caught.value)
            assert llm.is_finished()
        check(llm, case)


def adapter_of_a_larger_model(folder: Path) -> Path:
    """An adapter of a larger model."""
    model = make_model(folder / "larger", hidden_size=96)
    return make_adapter(model, folder / "of the larger", target_modules=EVERY_LINEAR)


@pytest.mark.parametrize("given", ["sql", 1, [None], [1, 2]])
def test_bad_requests_are_refused(given: Any, case: AdaptedCase) -> None:
    with adapted_llm(case, max_loras=1) as llm:
        with pytest.raises((TypeError, ValueError), match="lora_request must be"):
            llm.generate([PROMPT] * 2, GREEDY, False, given)
        assert llm.is_finished()


def test_adapters_need_their_option(case: AdaptedCase) -> None:
    with make_llm(case.path) as llm:
        with pytest.raises(ValueError, match="needs enable_lora=True"):
            llm.generate([PROMPT], GREEDY, False, case.adapters[0])
        assert llm.is_finished()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_loras=0), "max_loras must be"),
        (dict(max_lora_rank=0), "max_lora_rank must be"),
        (dict(max_loras=3, max_cpu_loras=2), "max_cpu_loras must be at least max_loras=3, got 2"),
        (dict(lora_modules=["sql"]), "lora_modules must be like NAME=PATH, got 'sql'"),
        (dict(lora_modules=["a=b", "a=c"]), "different names, got 'a' twice"),
        (dict(lora_modules=["a=b"], enable_lora=False), "lora_modules need enable_lora=True"),
        (dict(lora_modules=["a=/none"]), "lora_request 'a'"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, case: AdaptedCase) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        adapted_llm(case, **options)


def test_forms_of_a_request() -> None:
    plain = LoRARequest("sql", "/a")
    assert (plain.name, plain.path, plain.adapter_id) == ("sql", "/a", None)
    for request in (
        LoRARequest("sql", 1, "/a"), LoRARequest("sql", 1, lora_path="/a"),
        LoRARequest(lora_name="sql", lora_int_id=1, lora_path=Path("/a")),
    ):  # fmt: skip
        assert (request.name, request.path, request.adapter_id) == ("sql", "/a", 1)
    for given in (
        ("sql",),
        ("sql", 1),
        ("sql", 1, "/a", 2),
        ("sql", 0, "/a"),
        ("", "/a"),
        (1, "/a"),
    ):
        with pytest.raises((TypeError, ValueError), match=r"lora_|LoRARequest"):
            LoRARequest(*given)


ON_DEVICE: dict[str, Any] = dict(device="cuda", num_kvcache_blocks=2000)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {}, dict(enforce_eager=True), dict(max_loras=1), dict(SMALL_POOL, max_loras=2), HARD,
        dict(speculative_config=NGRAMS), dict(scheduling="mixed", max_num_batched_tokens=60),
        dict(tensor_parallel_size=2),
    ],
)  # fmt: skip
def test_greedy_equals_peft_on_a_device(options: dict[str, Any], case: AdaptedCase) -> None:
    """Decode graphs with adapters and without, rows that change slots."""
    need_gpus(options.get("tensor_parallel_size", 1))
    with adapted_llm(case, **ON_DEVICE | options) as llm:
        check(llm, case)


def test_beam_search_takes_adapters(case: AdaptedCase) -> None:
    """With one beam it is greedy decoding; equal prompts differ by their adapters."""
    adapters: list[LoRARequest | None] = [None, *case.adapters]
    prompts = [PROMPT] * len(adapters)
    with adapted_llm(case) as llm:
        want = [o.token_ids for o in llm.generate(prompts, GREEDY, False, adapters)]
        params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
        found = llm.beam_search(prompts, params, adapters)
        assert [o.sequences[0].token_ids for o in found] == want
        assert len({tuple(tokens) for tokens in want}) > 1
        with pytest.raises(ValueError, match="lora_request must be one or as many as prompts"):
            llm.beam_search(prompts, params, adapters[1:])


def test_an_adapter_that_vanishes_in_a_beam_search_is_named(
    case: AdaptedCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to be read again, as the other one took its place in the host's memory."""
    path = shutil.copytree(case.adapters[0].path, tmp_path / "adapter")
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    with adapted_llm(case, max_loras=1, max_cpu_loras=1) as llm:
        likely_tokens = llm.parts.beams._likely_tokens

        def vanishing(going: Any) -> Any:
            shutil.rmtree(path, ignore_errors=True)
            return likely_tokens(going)

        monkeypatch.setattr(llm.parts.beams, "_likely_tokens", vanishing)
        lost = LoRARequest("lost", path)
        with pytest.raises(ValueError, match=r"^lora_request: .*adapter"):
            llm.beam_search([PROMPT] * 2, params, [lost, case.adapters[1]])
        monkeypatch.undo()
        assert llm.is_finished()
        check(llm, case)
