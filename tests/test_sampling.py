"""Sampling parameters, through the whole engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from reference import SMALL_POOL, make_llm, make_prompts

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

PROMPTS = make_prompts()[:30]
NARROWINGS: list[dict[str, Any]] = [
    {}, dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1), dict(temperature=0, bad_words=["a", "zz"]),
    dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2), dict(min_tokens=6),
    dict(logit_bias={5: 4.0, 6: -50.0}), dict(allowed_token_ids=list(range(40, 90)), top_k=3),
    dict(temperature=0, repetition_penalty=1.5),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make_llm(model_dir)


def generate(llm: LLM, prompts: Any, **params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [out["token_ids"] for out in outputs]


def test_seeded_requests_do_not_depend_on_their_neighbours(model_dir: Path) -> None:
    """Alone, together, in chunks, after preemptions: the same tokens."""
    params = [
        SamplingParams(**dict(seed=i, max_tokens=20, ignore_eos=True) | NARROWINGS[i % 10])
        for i in range(30)
    ]

    def run(**options: Any) -> list[list[int]]:
        with make_llm(model_dir, **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert llm.scheduler.num_preemptions > 0 or "num_kvcache_blocks" not in options
            return [out["token_ids"] for out in outputs]

    together = run()
    assert run(max_num_seqs=1) == together
    assert run(**SMALL_POOL, max_num_batched_tokens=16) == together


def test_two_ranks_draw_the_same_tokens(model_dir: Path, llm: LLM) -> None:
    params: dict[str, Any] = dict(top_k=20, repetition_penalty=1.2, seed=3, max_tokens=16)
    with make_llm(model_dir, tensor_parallel_size=2) as two:
        assert generate(two, PROMPTS[:5], **params) == generate(llm, PROMPTS[:5], **params)


def test_top_k_1_and_a_tiny_top_p_are_greedy(llm: LLM) -> None:
    greedy = generate(llm, PROMPTS, temperature=0, max_tokens=8)
    assert generate(llm, PROMPTS, temperature=3.0, top_k=1, max_tokens=8) == greedy
    assert generate(llm, PROMPTS, temperature=3.0, top_p=1e-6, max_tokens=8) == greedy


def test_min_tokens_delays_eos_and_stop_tokens(llm: LLM) -> None:
    """EOS would be the first token, else a stop token: neither comes before the sixth token."""
    likes = dict(logit_bias={257: 100.0, 40: 50.0}, stop_token_ids=[40], temperature=0)
    assert generate(llm, [1, 2, 3], **likes) == [[257]]
    (tokens,) = generate(llm, [1, 2, 3], min_tokens=5, **likes)
    assert len(tokens) == 6 and tokens[-1] == 257
    assert not {257, 40} & set(tokens[:-1])


def test_max_tokens_none_ends_at_max_model_len(llm: LLM) -> None:
    (tokens,) = generate(llm, [1, 2, 3], max_tokens=None, ignore_eos=True)
    assert len(tokens) == llm.config.max_model_len - 3


def test_bad_words_never_occur(llm: LLM) -> None:
    """One token is one byte: the last byte of a bad word is banned after the others."""
    likes: dict[str, Any] = dict(
        allowed_token_ids=[*llm.tokenizer.encode("abc ")], temperature=1.0, max_tokens=200, seed=1
    )
    unlike = SamplingParams(bad_words=["bc", "a"], **likes)
    free, bad = (
        llm.generate("x", params, use_tqdm=False)[0]["text"]
        for params in (SamplingParams(**likes), unlike)
    )
    assert "bc" in free and "a" in free
    assert "bc" not in bad and "a" not in bad and "b" in bad and "c" in bad


def test_bad_words_are_forbidden_at_the_start_and_behind_a_space(llm: LLM) -> None:
    words = llm.intake.accept("x", SamplingParams(bad_words=["ab"])).bad_words
    assert words is not None
    found = {start: words.after(llm.tokenizer.encode(start)) for start in ("a", " a", "x", "")}
    assert {start: len(sets) for start, sets in found.items()} == {"a": 1, " a": 2, "x": 0, "": 0}
    assert {llm.tokenizer.decode(some.array) for some in found[" a"]} == {"b"}


def test_allowed_tokens_prevail_over_bad_words(llm: LLM) -> None:
    """Only "b" is allowed, and "bb" is a bad word: "b" still comes."""
    likes = dict(allowed_token_ids=llm.tokenizer.encode("b"), bad_words=["bb"], max_tokens=5)
    assert set(generate(llm, [1], **likes)[0]) == set(llm.tokenizer.encode("b"))


def test_bad_words_outside_the_models_vocabulary_are_harmless(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        llm.tokenizer.add_tokens(["NEW"])
        assert len(generate(llm, [1], bad_words=["NEW", "a"], max_tokens=3)[0]) >= 1


@pytest.mark.parametrize("temperature", [1e-50, 1e-38, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float, llm: LLM) -> None:
    greedy = generate(llm, PROMPTS[:8], temperature=0, max_tokens=6)
    for cut in (dict(top_p=0.9), dict(top_k=3), dict(min_p=0.1), dict(top_p=1e-46)):
        assert generate(llm, PROMPTS[:8], temperature=temperature, max_tokens=6, **cut) == greedy


def test_skip_special_tokens_false_shows_them(llm: LLM) -> None:
    params = dict(allowed_token_ids=[257, 256], max_tokens=1, ignore_eos=True)
    shown, hidden = (
        llm.generate([5], SamplingParams(skip_special_tokens=skip, **params), use_tqdm=False)[0]
        for skip in (False, True)
    )
    assert hidden["text"] == "" and shown["text"] in ("<|eos|>", "<|pad|>")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(allowed_token_ids=[259]), "allowed_token_ids: a token id must be in [0, 258], got"),
        (dict(logit_bias={259: 1.0}), "logit_bias: a token id must be in [0, 258], got 259"),
        (dict(min_tokens=511, max_tokens=None), "min_tokens must be at most 510"),
        (dict(min_tokens=2, allowed_token_ids=[257]), "allowed_token_ids must hold more than"),
        (dict(allowed_token_ids=[64], bad_words=["a"]), "allowed_token_ids must hold more than"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(
    fields: dict[str, Any], words: str, llm: LLM
) -> None:
    with pytest.raises(ValueError, match="prompts\\[0\\]") as caught:
        generate(llm, [1, 2], **fields)
    assert words in str(caught.value)
    assert llm.is_finished()


def test_bad_words_need_a_tokenizer(tmp_path: Path) -> None:
    make_model(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with make_llm(tmp_path) as llm, pytest.raises(ValueError, match="bad_words: there is no text"):
        generate(llm, [1, 2], bad_words=["a"])


@pytest.mark.cuda
def test_a_device_draws_the_same_tokens(model_dir: Path, llm: LLM) -> None:
    """Except for near-ties, which are rare in float32."""
    params = [SamplingParams(**dict(seed=i, max_tokens=12) | NARROWINGS[i % 10]) for i in range(30)]

    def run(llm: LLM) -> list[list[int]]:
        return [out["token_ids"] for out in llm.generate(PROMPTS, params, use_tqdm=False)]

    with make_llm(model_dir, device="cuda", num_kvcache_blocks=500) as there:
        same = sum(a == b for a, b in zip(run(llm), run(there), strict=True))
    assert same >= 28
    torch.cuda.empty_cache()
