"""Tokens that a grammar forces are drafts: fewer steps, and the same output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from reference import HARD, SMALL_POOL, audit_at_rest, make_llm, make_prompts, run_to_end

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.grammar_proposer import GrammarProposer
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.paced_drafting import PacedDrafting
from nanovllm.drafting.step_sizes import MOST_DRAFTS
from nanovllm.engine.cache.caches import CacheLayout, Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.speculative_config import MOST_FORCED
from nanovllm.structured_outputs import StructuredOutputs
from tests.grammar_words import SIZE, TOKENIZER

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NONE = dict(speculative_config={"method": "none"})
GRAMMAR = {"method": "grammar", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
LONG = {
    "type": "object",
    "properties": {
        "name of the customer": {"type": "string", "maxLength": 3},
        "number of the address": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind of subscription": {"enum": ["monthly", "yearly"]},
    },
    "required": ["name of the customer", "number of the address", "kind of subscription"],
    "additionalProperties": False,
}
STRICT = dict(json=LONG, disable_any_whitespace=True)
KINDS: list[dict[str, Any] | None] = [
    STRICT,
    dict(json=LONG),
    dict(regex="(begin|beginning) and the end([.]{3}|!)"),
    None,
    dict(choice=["a longer text", "a longer time", "ja", "日本語", "日本人"]),
    dict(grammar='start: "SELECT " NAME " FROM " NAME (" LIMIT " NAME)?\nNAME: /[a-z]{1,3}/'),
    dict(choice=["an answer", "no answer"], after="b"),
]
MORE: list[dict[str, Any]] = [
    {}, dict(n=3), dict(logprobs=2), dict(repetition_penalty=1.3, presence_penalty=0.5),
    dict(min_tokens=3), dict(min_tokens=30), dict(stop=["of", " the "]), dict(temperature=0),
    dict(bad_words=["ad"]), dict(max_tokens=9), dict(ignore_eos=True), dict(top_k=20, top_p=0.8),
    dict(temperature=0, logprobs=0, prompt_logprobs=1), dict(logit_bias={65: 9.0}, n=2),
    dict(stop_token_ids=[*range(40, 60)]),
]  # fmt: skip
REGIMES: dict[str, dict[str, Any]] = {
    "no option": {},
    "grammar": dict(speculative_config=GRAMMAR),
    "n-grams": dict(speculative_config=NGRAM),
    "overlap": dict(overlap=True),
    "overlap, n-grams": dict(speculative_config=NGRAM, overlap=True),
    "budget 7": dict(max_num_batched_tokens=7),
    "small pool, budget 16": HARD,
    "small pool, overlap": dict(SMALL_POOL, overlap=True),
    "small pool, overlap, n-grams": dict(HARD, speculative_config=NGRAM, overlap=True),
    "three at a time": dict(max_num_seqs=3),
    "no prefix cache, blocks of 1": dict(enable_prefix_caching=False, kvcache_block_size=1),
    "mixed, overlap": dict(scheduling="mixed", overlap=True, max_num_batched_tokens=60),
    "mixed, small pool": dict(HARD, scheduling="mixed"),
    "plain PyTorch": dict(attention_backend="torch", speculative_config=GRAMMAR),
    "plain PyTorch, overlap": dict(
        HARD, attention_backend="torch", speculative_config=GRAMMAR, overlap=True
    ),
    "two ranks": dict(tensor_parallel_size=2, speculative_config=GRAMMAR),
}  # fmt: skip
PROMPTS = [prompt for prompt in make_prompts() if len(prompt) < 100][:45]


def params_of(number: int) -> list[SamplingParams]:
    """Random draws at 1.5 with the constraints and other parameters, in all their pairs."""
    return [
        SamplingParams(
            **{
                "temperature": 1.5, "max_tokens": 90, "seed": index,
                "structured_outputs": KINDS[index % len(KINDS)],
                **MORE[index % len(MORE)],
            }
        )
        for index in range(number)
    ]  # fmt: skip


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """What users see of each sample but its log-probabilities."""
    return [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


def logprobs_of(outputs: list[RequestOutput]) -> torch.Tensor:
    """The log-probabilities of all tokens for which they were asked for."""
    samples = [sample for output in outputs for sample in output.outputs]
    return torch.tensor([step[0].logprob for one in samples for step in one["logprobs"] or ()])


def steps_of(llm: LLM, structured: dict[str, Any], seed: int = 0) -> tuple[int, list[int]]:
    """How many steps a request takes, and its tokens."""
    params = SamplingParams(
        temperature=1.5, seed=seed, max_tokens=200, structured_outputs=structured
    )
    llm.add_request([1, 2, 3], params)
    for count in range(1, 300):
        if outputs := llm.step():
            return count, outputs[0].token_ids
    raise AssertionError("it never finishes")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[RequestOutput]:
    """What is generated without drafts."""
    with make_llm(model_dir, **NONE) as llm:
        assert not isinstance(llm.scheduler.drafting, HostDrafting)
        outputs = llm.generate(PROMPTS, params_of(len(PROMPTS)), use_tqdm=False)
        assert llm.stats().drafted_tokens == 0
    reasons = [sample.finish_reason for output in outputs for sample in output.outputs]
    assert min(map(reasons.count, ("stop", "length", "error"))) > 1, "too few of some ends"
    return outputs


@pytest.mark.sampled(share=0.4)
@pytest.mark.parametrize("name", REGIMES)
def test_forced_tokens_keep_every_output(
    name: str, expected: list[RequestOutput], model_dir: Path
) -> None:
    """Drafts are wrong only where another parameter ends a request within them."""
    with make_llm(model_dir, **REGIMES[name]) as llm:
        outputs = llm.generate(PROMPTS, params_of(len(PROMPTS)), use_tqdm=False)
        assert seen(outputs) == seen(expected)
        torch.testing.assert_close(logprobs_of(outputs), logprobs_of(expected), atol=1e-3, rtol=0)
        audit_at_rest(llm)
        stats = llm.stats()
        assert stats.accepted_tokens > 60
        assert "n-grams" in name or stats.accepted_tokens > 0.95 * stats.drafted_tokens


def test_a_step_takes_all_forced_tokens(model_dir: Path) -> None:
    """Long names of properties are written in a few steps, however many tokens they have."""
    for structured, most in ((STRICT, 0.35), (dict(json=LONG), 0.8)):
        with make_llm(model_dir, **NONE) as llm:
            plain, tokens = steps_of(llm, structured)
            assert plain == len(tokens) > 90
        with make_llm(model_dir) as llm:
            fewer, same = steps_of(llm, structured)
            stats = llm.stats()
        assert same == tokens and fewer < most * plain
        assert stats.accepted_tokens == stats.drafted_tokens == plain - fewer
        with make_llm(model_dir, speculative_config=NGRAM) as llm:
            assert steps_of(llm, structured)[1] == tokens


def test_a_text_that_is_known_takes_the_fewest_steps(model_dir: Path) -> None:
    """A prompt's step gives one token, each other one up to `num_speculative_tokens` and one."""
    text = "x" * 35
    for most in (1, 4, 16, 64):
        config = {"method": "grammar", "num_speculative_tokens": most}
        with make_llm(model_dir, speculative_config=config) as llm:
            steps, tokens = steps_of(llm, dict(choice=[text]))
            assert len(tokens) == len(text)
            assert steps == 1 + -(-(len(text) - 1) // (1 + most))
            assert llm.stats().accepted_tokens == llm.stats().decode_tokens - (steps - 1)


def test_tokens_of_several_letters_are_forced(tmp_path: Path) -> None:
    """As the tokenizer makes them; the last of a text may join with what follows."""
    make_model(tmp_path, vocab_size=SIZE, eos_token_id=TOKENIZER.eos_token_id)
    TOKENIZER.save_pretrained(tmp_path)
    structured = dict(regex='(abcab12)+éé"|(日本ab){2}(c|a)x')
    outputs = {}
    for name, options in dict(none=NONE, no_option={}).items():
        with make_llm(tmp_path, **options) as llm:
            outputs[name] = [steps_of(llm, structured, seed) for seed in range(12)]
            taken, drafted = llm.stats().accepted_tokens, llm.stats().drafted_tokens
    assert [tokens for _, tokens in outputs["none"]] == [t for _, t in outputs["no_option"]]
    steps = {name: sum(count for count, _ in found) for name, found in outputs.items()}
    assert steps["no_option"] == steps["none"] - taken < 0.7 * steps["none"]
    assert taken == drafted


def test_an_interrupted_call_goes_on_where_it_was(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=200, structured_outputs=STRICT)
    with make_llm(model_dir) as llm:
        (expected,) = llm.generate([[8, 8]], params, use_tqdm=False)
        for steps in (1, 2, 5):
            llm.add_request([8, 8], params)
            for _ in range(steps):
                llm.step()
            with monkeypatch.context() as patch:
                patch.setattr(llm.model_runner, "draw", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    run_to_end(llm)
            assert [out.token_ids for out in run_to_end(llm)] == [expected.token_ids]
        audit_at_rest(llm)


def test_nothing_is_asked_without_a_constraint(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that never sees one has no drafts, and no metrics of them."""
    monkeypatch.setattr(GrammarProposer, "propose", lambda *_: 1 / 0)
    with make_llm(model_dir, overlap=True) as llm:
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=9), use_tqdm=False)
        assert not [m for m in llm.get_metrics() if "spec_decode" in m.name]
        params = SamplingParams(structured_outputs=dict(choice=["abc"]))
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1]], params, use_tqdm=False)


def test_drafts_of_an_engine_without_the_option_are_counted(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        steps_of(llm, dict(choice=["abcdef"]))
        found = {m.name: m for m in llm.get_metrics() if "spec_decode" in m.name}
    assert found["vllm:spec_decode_num_accepted_tokens"].value == 4  # type: ignore[union-attr]
    assert found["vllm:spec_decode_num_drafts"].value == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "guesses", "forced"),
    [
        ({}, 0, MOST_FORCED),
        (dict(attention_backend="torch"), None, None),
        (NONE, None, None),
        (dict(NONE, attention_backend="torch"), None, None),
        (dict(speculative_config={"method": "grammar"}), 0, MOST_FORCED),
        (dict(speculative_config=GRAMMAR, attention_backend="torch"), 0, 3),
        (dict(speculative_config=NGRAM), 5, MOST_FORCED),
        (dict(speculative_config=NGRAM, attention_backend="torch"), 5, 0),
    ],
)
def test_options_say_what_is_drafted(
    options: dict[str, Any], guesses: int | None, forced: int | None, model_dir: Path
) -> None:
    with make_llm(model_dir, **options) as llm:
        asks = options.get("speculative_config") is not None
        assert isinstance(llm.scheduler.drafting, PacedDrafting) == (asks and guesses is not None)
        llm.add_request([1, 2], SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])))
        found, drafting = None, llm.scheduler.drafting
        if isinstance(drafting, PacedDrafting):
            found = drafting.most_drafts, getattr(drafting, "most_forced", 0)
        assert found == (None if guesses is None else (guesses, forced))


# Without a model


class Known:
    """A constraint that knows what comes next, or says so."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def forced(self, seq: Sequence, most: int) -> list[int]:
        assert not seq.num_pending_tokens and most > 0
        return self.tokens[:most]

    def update(self, seq: Sequence) -> None:
        pass

    def reset(self) -> None:
        pass


def make_seq(tokens: list[int] | None = None, **params: Any) -> Sequence:
    """A sequence of 5 tokens, 50 at most, with these forced ones."""
    constraint = None if tokens is None else Known(tokens)
    asked = SamplingParams(**{"max_tokens": 45, **params})
    seq = Sequence([1] * 5, asked, parts=SequenceParts(constraint=constraint))
    seq.block_tables, seq.num_passed_blocks = [[]], [0]
    return seq


class Guesses:
    """A proposer of guesses: as many as asked for."""

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        return [[9] * number for number in most]

    def reset(self) -> None:
        pass


def make_drafting(guesses: int = 0, most_forced: int = 8) -> HostDrafting:
    return HostDrafting(
        Guesses() if guesses else None, guesses, grammar=GrammarProposer(), most_forced=most_forced
    )


def drafts_of(
    drafting: HostDrafting, seqs: list[Sequence], budget: int = 1000, num_blocks: int = 999
) -> list[list[int]]:
    """Each sequence's drafts, for which it must have blocks of 4 tokens, and no more."""
    blocks = Caches(CacheLayout(), num_blocks, 4, 99, False)
    drafts = drafting.draft(seqs, len(seqs), budget, blocks)
    assert sum(map(len, drafts.values())) <= budget
    for seq, tokens in drafts.items():
        assert len(seq.block_table) == -(-(seq.num_tokens + len(tokens)) // 4)
    return [drafts.get(seq, []) for seq in seqs]


def test_forced_tokens_take_what_is_left() -> None:
    """Of the number, of the sequence's length, of the budget and of the blocks."""
    tokens = [*range(20)]
    assert drafts_of(make_drafting(), [make_seq(tokens)]) == [tokens[:8]]
    assert drafts_of(make_drafting(), [make_seq(tokens, max_tokens=4)]) == [tokens[:3]]
    assert drafts_of(make_drafting(), [make_seq(tokens, max_tokens=1)]) == [[]]
    assert drafts_of(make_drafting(), [make_seq(tokens)], budget=5) == [tokens[:5]]
    seqs = [make_seq(tokens), make_seq(tokens), make_seq([7])]
    assert drafts_of(make_drafting(), seqs, budget=9) == [tokens[:8], tokens[:1], []]
    seqs = [make_seq(tokens), make_seq(tokens)]
    assert drafts_of(make_drafting(), seqs, num_blocks=2) == [tokens[:3], []]


def test_many_sequences_have_forced_tokens_where_guesses_would_not_pay() -> None:
    """A right draft never takes longer than a step of its own."""
    seqs = [make_seq([3, 4, 5]) for _ in range(100)]
    assert drafts_of(make_drafting(4), seqs) == [[3, 4, 5][: MOST_DRAFTS // 100]] * 100
    seqs = [make_seq() for _ in range(100)]
    assert drafts_of(make_drafting(4), seqs) == [[]] * 100


def test_guesses_are_for_sequences_without_forced_tokens() -> None:
    seqs = [make_seq([3, 4, 5, 6, 7]), make_seq([]), make_seq()]
    assert drafts_of(make_drafting(2), seqs) == [[3, 4, 5, 6, 7], [9, 9], [9, 9]]
    seqs = [make_seq([3, 4, 5, 6, 7]), make_seq([]), make_seq()]
    assert drafts_of(make_drafting(), seqs) == [[3, 4, 5, 6, 7], [], []]
    seqs = [make_seq([3, 4]), make_seq()]
    assert drafts_of(make_drafting(2), seqs, budget=3) == [[3, 4], [9]]


def test_tokens_in_flight_must_be_known_first() -> None:
    drafting = make_drafting()
    seqs = [make_seq([3]), make_seq()]
    assert drafting.wants(seqs) and not drafting.wants(seqs[1:])
    for seq in seqs:
        seq.token_ids.append(-1)
        seq.num_pending_tokens = 1
    assert drafting.wants(iter(seqs)) and drafts_of(drafting, seqs) == [[], []]


def settle(drafting: HostDrafting, seq: Sequence, num_accepted: int) -> None:
    """A step with drafts for the sequence, of which so many are right."""
    blocks = Caches(CacheLayout(), 99, 4, 99, False)
    drafts = drafting.draft([seq], 1, 99, blocks)
    seq.num_cached_tokens = seq.num_tokens
    seq.token_ids += [1] * (num_accepted + 1)
    drafting.settle(Batch([seq], is_prefill=False, drafts=drafts), blocks)


def test_forced_tokens_do_not_teach_how_often_guesses_are_right() -> None:
    drafting = make_drafting(2)
    outlook, forced = drafting._outlook, make_seq([3, 4, 5])
    before = outlook.chance
    settle(drafting, forced, 3)
    assert (drafting.num_drafted, drafting.accepted_at) == (3, [1, 1, 1])
    assert outlook.chance == before and forced.parts.pace is None
    settle(drafting, make_seq(), 0)
    assert outlook.chance < before
    before = outlook.chance
    forced.parts.constraint.tokens = []
    settle(drafting, forced, 2)  # guesses now
    assert outlook.chance > before and forced.parts.pace is not None


def test_drafting_that_starts_over_keeps_no_sequence() -> None:
    for end in (HostDrafting.reset, lambda s: settle(s, make_seq(), 0)):
        drafting = make_drafting(2)
        drafts_of(drafting, [make_seq([3])])
        assert drafting._forced
        end(drafting)
        assert not drafting._forced
