"""Structured outputs in the engine: exact, in every regime, beside every other parameter."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import torch
from conftest import byte_tokenizer, make_model, need_gpus
from drafts import Adversary, speculate, use_graphs
from llguidance import LLMatcher, LLTokenizer
from reference import (
    HARD,
    NUM_STEPS,
    SMALL_POOL,
    assert_same,
    audit_at_rest,
    load_reference,
    make_llm,
    make_prompts,
    reference_logits,
    run_to_end,
)

from nanovllm import LLM, SamplingParams, StructuredOutputs
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.structured.grammars import Grammars
from nanovllm.structured.masked_draws import MaskedDraws

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

VOCAB_SIZE, EOS = 259, 257
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"
WORDS = ["no", "not", "nothing", "ja", "österreich", "日本"]
KINDS: list[dict[str, Any] | None] = [
    dict(json=PERSON, disable_any_whitespace=True),
    dict(regex=DATE),
    None,
    dict(choice=WORDS),
    dict(regex="[a-c]*x?"),
    dict(grammar='start: "SELECT " NAME ("," NAME)*\nNAME: /[a-z]{1,3}/'),
    None,
    dict(json_object=True),
]
GRAMMAR = dict(method="grammar", num_speculative_tokens=3)
REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "no drafts": dict(speculative_config=dict(method="none")),
    "forced tokens, small pool, budget 16, overlap": dict(
        HARD, speculative_config=GRAMMAR, overlap=True
    ),
    "forced tokens, plain PyTorch": dict(attention_backend="torch", speculative_config=GRAMMAR),
    "plain PyTorch": dict(attention_backend="torch"),
    "budget 7": dict(max_num_batched_tokens=7),
    "small pool, budget 16": HARD,
    "no prefix cache": dict(enable_prefix_caching=False),
    "overlap": dict(overlap=True),
    "overlap, small pool, budget 16": dict(HARD, overlap=True),
    "mixed, overlap": dict(scheduling="mixed", overlap=True, max_num_batched_tokens=60),
    "two ranks": dict(tensor_parallel_size=2, max_num_seqs=9),
    "two ranks, overlap": dict(tensor_parallel_size=2, overlap=True, **SMALL_POOL),
}
SPECULATION = dict(method="ngram", num_speculative_tokens=5)


def kinds(number: int) -> list[StructuredOutputs | None]:
    """A constraint for each of so many prompts, or none."""
    made = [None if kind is None else StructuredOutputs(**kind) for kind in KINDS]
    return [made[index % len(made)] for index in range(number)]


class Oracle:
    """Allows what a matcher accepts, found by trying every token, for a batch of sequences."""

    def __init__(self, asked: list[StructuredOutputs | None]) -> None:
        grammars = Grammars(byte_tokenizer(), VOCAB_SIZE, [EOS])
        self.matchers = [one and grammars.constraint(one)._start.deep_copy() for one in asked]
        self.ended = [False] * len(asked)
        self.tokens: list[list[int]] = [[] for _ in asked]

    def narrow(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude the tokens that are not allowed, and follow the best of the others."""
        logits = logits.clone()
        for row, matcher in enumerate(self.matchers):
            if matcher is not None and not self.ended[row]:
                allowed = [self._is_allowed(matcher, token_id) for token_id in range(VOCAB_SIZE)]
                logits[row, ~torch.tensor(allowed)] = -torch.inf
            token_id = int(logits[row].argmax())
            if not self.ended[row]:
                self.tokens[row].append(token_id)
            if matcher is not None and not self.ended[row]:
                matcher.consume_token(token_id)
                self.ended[row] = matcher.is_stopped()
        return logits

    def _is_allowed(self, matcher: LLMatcher, token_id: int) -> bool:
        if token_id == EOS:
            return bool(matcher.is_accepting())
        return matcher.validate_tokens([token_id]) == 1


Greedy = tuple[list[list[int]], list[SamplingParams], list[list[int]]]


@pytest.fixture(scope="module")
def greedy(model_dir: Path) -> Greedy:
    """Prompts, parameters, and the tokens of transformers with the oracle."""
    prompts = make_prompts()
    asked = kinds(len(prompts))
    oracle = Oracle(asked)
    logits = reference_logits(load_reference(model_dir), prompts, narrow=oracle.narrow)
    best = logits.topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]).nan_to_num(torch.inf).amin(dim=1)
    kept = [index for index, margin in enumerate(margins.tolist()) if margin > 1e-4]
    assert len(kept) > 45
    params = [
        SamplingParams(
            temperature=0, max_tokens=NUM_STEPS - 3 * index % 11, structured_outputs=asked[index],
            ignore_eos=asked[index] is None,
        )
        for index in kept
    ]  # fmt: skip
    expected = [oracle.tokens[i][: p.max_tokens] for i, p in zip(kept, params, strict=True)]
    return [prompts[index] for index in kept], params, expected


@pytest.mark.parametrize("name", REGIMES)
def test_greedy_equals_transformers_with_an_oracle(
    name: str, greedy: Greedy, model_dir: Path
) -> None:
    """Whose mask is what a fresh matcher accepts, token by token; rows without one are as ever."""
    prompts, params, expected = greedy
    with make_llm(model_dir, **REGIMES[name]) as llm:
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        audit_at_rest(llm)
        assert (llm.stats().accepted_tokens > 0) == isinstance(llm.scheduler.drafting, HostDrafting)


def watch_masked_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that will have how many rows each masked draw of a graph's step had."""
    numbers: list[int] = []
    draw = MaskedDraws.__call__

    def counting(self: Any, computed: Any, filters: list[Any]) -> Any:
        numbers.append(len(filters[0].rows))
        return draw(self, computed, filters)

    monkeypatch.setattr(MaskedDraws, "__call__", counting)
    return numbers


@pytest.mark.parametrize("options", [{}, HARD, dict(speculative_config=GRAMMAR)])
def test_masked_draws_of_graphs_equal_others(
    options: dict[str, Any], greedy: Greedy, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded batches that shrink, whose masked rows change; with drafts, and hot rows."""
    prompts, params, expected = greedy
    options = dict(options, attention_backend="torch")
    hot = [replace(p, temperature=1.5, seed=i) for i, p in enumerate(params)]
    with make_llm(model_dir, **options) as llm:
        others = llm.generate(prompts, hot, use_tqdm=False)
    with make_llm(model_dir, **options) as llm:
        numbers = watch_masked_draws(monkeypatch)
        use_graphs(llm)
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        outputs = llm.generate(prompts, hot, use_tqdm=False)
        assert [out.token_ids for out in outputs] == [out.token_ids for out in others]
        assert len(numbers) > 20 and len({*numbers}) >= 5
        audit_at_rest(llm)


ON_DEVICE = dict(device="cuda", num_kvcache_blocks=2000)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [
    {}, dict(speculative_config=GRAMMAR), dict(speculative_config=SPECULATION),
    dict(enforce_eager=True), HARD, dict(tensor_parallel_size=2),
])  # fmt: skip
def test_greedy_equals_transformers_with_an_oracle_on_a_device(
    options: dict[str, Any], greedy: Greedy, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are filled while graphs run, and drafts of a grammar are in the device table."""
    need_gpus(options.get("tensor_parallel_size", 1))
    prompts, params, expected = greedy
    numbers = watch_masked_draws(monkeypatch)
    with make_llm(model_dir, **ON_DEVICE | options) as llm:
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        audit_at_rest(llm)
        graphs = llm.model_runner.shard.graphs
        masked = None if graphs is None else graphs.redraws
        draws_alone = not {"enforce_eager", "tensor_parallel_size"} & {*options}
        assert bool(numbers) == (masked is not None) == draws_alone
        assert masked is None or len(masked._captured) == len(graphs.sizes)


@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, overlap=True)])
@pytest.mark.parametrize("in_table", [False, True])
def test_drafts_keep_the_output(
    options: dict[str, Any], in_table: bool, greedy: Greedy, model_dir: Path
) -> None:
    """Masks of the tokens after drafts, right ones and wrong ones."""
    prompts, params, expected = greedy
    if in_table:
        options = dict(options, attention_backend="torch")
    with make_llm(model_dir, speculative_config=SPECULATION, **options) as llm:
        outputs = {
            (tuple(prompt), 0): tokens for prompt, tokens in zip(prompts, expected, strict=True)
        }
        drafting = speculate(llm, Adversary(3, VOCAB_SIZE, outputs))
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        assert sum(drafting.accepted_at) > 100
        audit_at_rest(llm)


def hot_params(number: int) -> list[SamplingParams]:
    """Random draws at 1.5, the hardest case, with siblings and other parameters."""
    more: list[dict[str, Any]] = [
        {}, dict(n=3), dict(top_k=20, top_p=0.9), dict(presence_penalty=1.0, logprobs=1),
        dict(min_tokens=2), dict(logit_bias={34: 5.0}), dict(bad_words=["0"]),
    ]  # fmt: skip
    return [
        SamplingParams(
            temperature=1.5, max_tokens=40, seed=index, structured_outputs=one,
            **more[index % len(more)],
        )
        for index, one in enumerate(kinds(number))
    ]  # fmt: skip


def check(text: str, asked: dict[str, Any]) -> None:
    """What finished by itself is what was asked for, found by other means."""
    if "json" in asked:
        jsonschema.validate(json.loads(text), PERSON)
    elif "json_object" in asked:
        assert isinstance(json.loads(text), dict)
    elif "choice" in asked:
        assert text in WORDS
    elif "regex" in asked:
        assert re.fullmatch(asked["regex"], text)
    else:
        assert re.fullmatch(r"SELECT [a-z]{1,3}(,[a-z]{1,3})*", text)


def test_hot_samples_are_valid_and_equal_in_every_regime(model_dir: Path) -> None:
    prompts = [prompt for prompt in make_prompts() if len(prompt) < 180]  # with room in any pool
    params = hot_params(len(prompts))
    results = []
    for options in REGIMES.values():
        with make_llm(model_dir, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[one.token_ids for one in out.outputs] for out in outputs])
            audit_at_rest(llm)
    assert all(result == results[0] for result in results[1:])
    checked = 0
    for index, out in enumerate(outputs):
        asked = KINDS[index % len(KINDS)]
        for sample in out.outputs if asked else ():
            assert sample.finish_reason in ("stop", "length", "error")
            if sample.finish_reason == "stop":
                check(sample.text, asked or {})
                checked += 1
    assert checked > 40


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Any:
    with make_llm(model_dir) as made:
        yield made


def answer(llm: LLM, structured: dict[str, Any], **params: Any) -> Any:
    asked = SamplingParams(structured_outputs=structured, **{"seed": 3, **params})
    return llm.generate([[5, 6, 7]], asked, use_tqdm=False)[0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_request_ends_with_the_grammar(ignore_eos: bool, llm: LLM) -> None:
    """Where nothing but the end may come, no token is drawn for it."""
    out = answer(llm, dict(regex="[ab]{7}"), ignore_eos=ignore_eos, max_tokens=None)
    assert re.fullmatch("[ab]{7}", out.text)
    assert (out.finish_reason, out.stop_reason, len(out.token_ids)) == ("stop", None, 7)


def test_eos_may_come_where_the_grammar_may_end(llm: LLM) -> None:
    """And only there; with `ignore_eos` nowhere."""
    bias = {EOS: 100.0}
    out = answer(llm, dict(regex="[ab]{3}[ab]*"), logit_bias=bias, max_tokens=9)
    assert re.fullmatch("[ab]{3}", out.text) and out.token_ids[-1] == EOS
    assert out.finish_reason == "stop"
    out = answer(llm, dict(regex="[ab]*"), logit_bias=bias, max_tokens=9, ignore_eos=True)
    assert re.fullmatch("[ab]{9}", out.text) and out.finish_reason == "length"


@pytest.mark.parametrize(
    "others",
    [
        dict(min_tokens=4),
        dict(allowed_token_ids=[0, 1, 2]),
        dict(bad_words=["b"]),
    ],
)
def test_nothing_to_draw_is_an_error_of_that_request_alone(others: Any, llm: LLM) -> None:
    ab = "".join(byte_tokenizer().convert_ids_to_tokens([0, 1]))
    text = {"allowed_token_ids": f"{ab[0]}zz", "bad_words": "ab"}.get(next(iter(others)), "ab")
    params = [
        SamplingParams(structured_outputs=dict(choice=[text]), logprobs=0, **others),
        SamplingParams(structured_outputs=dict(choice=["fine"])),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    alone = llm.generate([[9, 9]], params[2], use_tqdm=False)[0]
    bad, good, other = llm.generate([[1], [2], [9, 9]], params, use_tqdm=False)
    assert bad.finish_reason == "error" and "no token to draw" in bad.stop_reason
    assert text.startswith(bad.text) and len(bad.token_ids) == len(bad.logprobs) == len(bad.text)
    assert (good.text, good.finish_reason) == ("fine", "stop")
    assert other.token_ids == alone.token_ids
    audit_at_rest(llm)


@pytest.mark.parametrize("options", [{}, dict(attention_backend="torch", overlap=True)])
@pytest.mark.parametrize("cuts", [{}, dict(top_k=5), dict(top_p=0.5)])
@pytest.mark.parametrize("others", [dict(allowed_token_ids=[9, 8]), dict(bad_words=["!"])])
def test_token_0_is_not_drawn_in_place_of_none(
    others: Any, cuts: Any, options: Any, model_dir: Path
) -> None:
    """Although the grammar allows it; what is drawn where nothing is left is never kept."""
    params = SamplingParams(structured_outputs=dict(regex='!{3}"'), **others, **cuts)
    with make_llm(model_dir, **options) as llm:
        assert llm.tokenizer.encode("!") == [0]
        (out,) = llm.generate([[5, 6]], params, use_tqdm=False)
        assert (out.token_ids, out.finish_reason) == ([], "error")
        audit_at_rest(llm)


@pytest.mark.parametrize("others", [{}, dict(stop_token_ids=[0, 1], ignore_eos=True)])
def test_an_end_that_is_token_0_is_not_drawn_in_place_of_none(others: Any, tmp_path: Path) -> None:
    """As half an output would look like a whole one."""
    make_model(tmp_path, eos_token_id=0)
    with make_llm(tmp_path) as llm:
        assert 0 in llm.eos_token_ids
        out = answer(llm, dict(choice=["abc"]), bad_words=["b"], **others)
        assert (out.text, out.finish_reason) == ("a", "error")


def test_a_stream_of_a_failed_request_ends_with_its_error(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=dict(choice=["abc"]), min_tokens=9)
    events = list(llm.stream([[1, 2]], params))
    assert "".join(event.text for event in events) == "abc"
    assert events[-1].finish_reason == "error"
    assert [t for event in events for t in event.token_ids] == llm.tokenizer.encode("abc")


def test_streams_have_the_same_text(llm: LLM) -> None:
    for seed in range(5):
        params = SamplingParams(
            temperature=1.5, seed=seed, max_tokens=60, structured_outputs=KINDS[0]
        )
        (whole,) = llm.generate([[4, 4]], params, use_tqdm=False)
        events = list(llm.stream([[4, 4]], params))
        assert "".join(event.text for event in events) == whole.text
        assert events[-1].finish_reason == whole.finish_reason


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    """Even where it comes with the grammar's last token."""
    out = answer(llm, dict(choice=["one, two"]), stop=[","])
    assert (out.text, out.finish_reason, out.stop_reason) == ("one", "stop", ",")
    out = answer(llm, dict(choice=["one,"]), stop=[","])
    assert (out.text, out.finish_reason, out.stop_reason) == ("one", "stop", ",")


def test_text_before_the_constraint_is_free(model_dir: Path, llm: LLM) -> None:
    """Up to its marker, which may come inside of drafts."""
    structured = dict(choice=["yes", "no"], after="b")
    params = [
        SamplingParams(
            temperature=1.5, seed=seed, max_tokens=80, structured_outputs=structured,
            logit_bias={llm.tokenizer.encode("b")[0]: 3.0}, ignore_eos=True,
        )
        for seed in range(12)
    ]  # fmt: skip
    prompts = [[3, 1, seed] for seed in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    ended = [out.text.partition("b") for out in outputs if out.finish_reason == "stop"]
    assert len(ended) > 6 and all(after in ("yes", "no") for _, _, after in ended)
    assert any(before for before, _, _ in ended)
    expected = [out.token_ids for out in outputs]
    known = {(tuple(p), 0): tokens for p, tokens in zip(prompts, expected, strict=True)}
    for options in (dict(overlap=True), dict(overlap=True, attention_backend="torch")):
        with make_llm(model_dir, speculative_config=SPECULATION, **options) as other:
            speculate(other, Adversary(3, VOCAB_SIZE, known))
            again = other.generate(prompts, params, use_tqdm=False)
            assert [out.token_ids for out in again] == expected


@pytest.mark.parametrize(
    ("part", "method"), [("model_runner", "draw"), ("scheduler", "postprocess")]
)
def test_an_interrupted_call_goes_on_where_it_was(
    part: str, method: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every follower starts over, and follows the tokens that are there."""
    params = SamplingParams(
        temperature=1.5, seed=1, max_tokens=60, structured_outputs=dict(regex="([a-z]{3}-){9}")
    )
    prompts = [[8, number] for number in range(6)]  # so many are followed together
    with make_llm(model_dir, overlap=True) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        for steps in (1, 3, 10):
            for prompt in prompts:
                llm.add_request(prompt, params)
            for _ in range(steps):
                llm.step()
            with monkeypatch.context() as patch:
                patch.setattr(getattr(llm, part), method, lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    run_to_end(llm)
            outputs = sorted(run_to_end(llm), key=lambda out: out.request_id)
            assert [out.token_ids for out in outputs] == expected
        audit_at_rest(llm)


class Address(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    street: str = pydantic.Field(max_length=5, pattern="^[a-z]*$")
    number: int = pydantic.Field(ge=1, le=99)


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: str = pydantic.Field(pattern="^(new|old)$")
    addresses: list[Address] = pydantic.Field(min_length=1, max_length=2)


def test_pydantic_models_are_schemas(llm: LLM) -> None:
    structured = dict(json=Customer, disable_any_whitespace=True)
    for seed in range(5):
        out = answer(llm, structured, seed=seed, max_tokens=200, temperature=1.5)
        assert Customer.model_validate_json(out.text).addresses


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword": (
        dict(json={"type": "object", "properties": {"a": {"not": {}}}}),
        r'Unimplemented keys: \["not"\] \(at #/properties/a/not\)',
    ),
    "a format": (dict(json={"items": {"format": "zip"}}), r"Unknown format: zip \(at #/items/fo"),
    "a reference": (dict(json={"$ref": "#/x"}), "Pointer '/x' does not exist"),
    "false": (dict(json=False), "the schema false"),
    "a pattern": (dict(regex="a/\n("), r"unclosed group, at character 4 of 'a/\\n\(': '\('$"),
    "look-ahead": (dict(regex="a(?=b)"), r"look-around.* at character 2 of 'a\(\?=b\)'.*\)'$"),
    "an anchor": (dict(regex="a^b"), r"regex: anchors .* \(Start\) are not supported, in 'a\^b'$"),
    "a rule": (dict(grammar="start: x"), 'unknown name: "x"'),
    "a tag": (dict(structural_tag={}), "triggers"),
    "another name in a tag": (
        dict(structural_tag=dict(triggers=["<f"], structures=[{}], foo=1)),
        "alone",
    ),
    "a rule of GBNF": (dict(grammar="root ::= foo"), "grammar: as GBNF, .*foo"),
    "GBNF that does not end": (dict(grammar='root ::= ("a"'), "grammar: as GBNF, "),
    "a token by its name": (
        dict(grammar='start: "1" <think>'),
        r"grammar: at 1\(\d+\): tokens are named by their ids, such as <\[5\]>, got <think>;"
        r" a text stands in quotes\n",
    ),
    "a token that is none": (
        dict(grammar='start: "1" <[99999]>'),
        r"grammar: at .*: the vocabulary has no token 99999",
    ),
    "a tag's token that is none": (
        dict(structural_tag=dict(format=dict(type="token", token=99999))),
        "structural_tag: the vocabulary has no token 99999$",
    ),
    "a backslash": (dict(regex="a\\"), "nothing to escape"),
    "an empty class": (dict(regex=r"[^\s\S]"), "no text can begin"),
    "a rule without an end": (dict(grammar='start: start "a"'), "no text can begin"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_at_the_call(name: str, llm: LLM) -> None:
    structured, message = REFUSED[name]
    good = SamplingParams(structured_outputs=dict(choice=["a"]))
    bad = SamplingParams(structured_outputs=structured)
    with pytest.raises(ValueError, match=rf"(?s)prompts\[1\]: structured_outputs: .*{message}"):
        llm.generate([[1], [2]], [good, bad], use_tqdm=False)
    assert llm.is_finished()
    audit_at_rest(llm)


def test_without_a_tokenizer_the_error_says_so(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    with make_llm(tmp_path) as llm, pytest.raises(ValueError, match="has no tokenizer"):
        llm.generate([[1]], SamplingParams(structured_outputs=dict(regex="a")), use_tqdm=False)


@pytest.mark.parametrize("name", ["<|eos|>", "<|im_start|>"])
def test_a_text_may_have_the_name_of_a_special_token(name: str, llm: LLM) -> None:
    """It is written by ordinary tokens, also where nothing else may come."""
    pattern = f"a{re.escape(name)}b"
    for structured in (dict(choice=[f"a{name}b"]), dict(regex=pattern)):
        assert answer(llm, structured).text == f"a{name}b"
    assert answer(llm, dict(json={"enum": [f"a{name}b"]})).text == f'"a{name}b"'
    schema = {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}
    closed = dict(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    assert json.loads(answer(llm, closed).text) == {name: 1}


def test_the_text_before_a_marker_cannot_end(llm: LLM) -> None:
    """It would look like an answer that keeps the constraint."""
    out = answer(llm, dict(choice=["a"], after="</think>"), logit_bias={EOS: 100.0}, max_tokens=9)
    assert out.finish_reason == "length" and EOS not in out.token_ids


def test_structural_tags_constrain_what_is_between_them(llm: LLM) -> None:
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {"enum": [1, 22]}, "end": "</f>"}],
    }
    bias = {llm.tokenizer.encode(c)[0]: 9.0 for c in "<f"}
    found = []
    for seed in range(10):
        out = answer(llm, dict(structural_tag=tag), seed=seed, max_tokens=50, logit_bias=bias)
        found += re.findall("<f(.*)", out.text)
    assert found and all(re.match(r">(1|22)</f>|>?(1|22?)?(</?f?)?$", part) for part in found)


def test_llguidance_is_imported_when_it_is_needed(model_dir: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys\nfrom nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({str(model_dir)!r}, device='cpu', dtype='float32', cpu_kvcache_gib=0.05)\n"
        "llm.generate([[1]], use_tqdm=False)\nassert 'llguidance' not in sys.modules\n"
        "params = SamplingParams(structured_outputs=dict(choice=['a']))\n"
        "print(llm.generate([[1]], params, use_tqdm=False)[0].text)\n"
        "assert 'llguidance' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "a\n"


def test_tokens_behind_the_vocabulary_are_never_drawn(model_dir: Path, tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"aaa{i}" for i in itertools.islice(itertools.count(), 100)])
    assert len(tokenizer) > VOCAB_SIZE
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    with make_llm(tmp_path) as llm:
        out = answer(llm, dict(regex="(aaa[0-9]){4}"), max_tokens=20)
        assert re.fullmatch("(aaa[0-9]){4}", out.text) and max(out.token_ids) < VOCAB_SIZE


def test_llguidance_takes_several_ends() -> None:
    """Models have up to three tokens that end a text."""
    tokenizer = LLTokenizer(byte_tokenizer().backend_tokenizer.to_str(), eos_token=[257, 258])
    assert tokenizer.eos_tokens == [257, 258]
