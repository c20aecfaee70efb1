"""`bench --acceptance`: drafts that are right by chance, in an engine that does all the rest."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafts import Eager
from reference import audit_at_rest, make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.bench import measure
from nanovllm.bench.acceptance import accept_by_chance
from nanovllm.bench.roofline import Machine
from nanovllm.command.main import main
from nanovllm.drafting.costs import TokenCosts
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.engine.schedule.drafting import Drafting

pytestmark = pytest.mark.usefixtures("one_thread")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SHORT = ("--num-seqs=2", "--min-input-len=4", "--max-input-len=4", "--min-output-len=41",
         "--max-output-len=41", "--max-model-len=64", "--num-kvcache-blocks=8",
         "--repeats=1", "--device=cpu")  # fmt: skip
DRAFTS = f"--speculative-config={json.dumps(NGRAM)}"


@pytest.fixture
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir, speculative_config=NGRAM) as made:
        yield made


def run(llm: LLM, num_seqs: int = 1, num_tokens: int = 41) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=7)
    outputs = llm.generate([[1 + i, 2, 3] for i in range(num_seqs)], params, use_tqdm=False)
    assert all(len(output.token_ids) == num_tokens for output in outputs)
    audit_at_rest(llm)
    return [output.token_ids for output in outputs]


def test_all_drafts_are_right(llm: LLM) -> None:
    """The prompt gives a token, and then each step four drafts and one token."""
    accept_by_chance(llm, 1, seed=3)
    run(llm)
    stats = llm.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (32, 32)
    assert llm.counter.tokens_per_step(type(llm.counter)()) == 5


def test_no_draft_is_right(llm: LLM) -> None:
    """Then the output is the model's own, although its drafts are random."""
    drafting, llm.scheduler.drafting = llm.scheduler.drafting, Drafting()
    expected = run(llm, 3)
    llm.scheduler.drafting = drafting
    accept_by_chance(llm, 0, seed=3)
    assert run(llm, 3) == expected
    assert llm.stats().accepted_tokens == 0 < llm.stats().drafted_tokens


def test_accepted_drafts_are_the_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_by_chance(llm, 1, seed=3)
    drafting = llm.scheduler.drafting
    assert isinstance(drafting, HostDrafting)
    drafts: list[int] = []
    propose = drafting.proposer.propose

    def recording(*args: Any) -> list[list[int]]:
        (proposed,) = propose(*args)
        drafts.extend(proposed)
        return [proposed]

    monkeypatch.setattr(drafting.proposer, "propose", recording)
    (tokens,) = run(llm)
    assert [token for place, token in enumerate(tokens) if place % 5] == drafts


@pytest.mark.parametrize("chance", [0.3, 0.7])
def test_drafts_are_right_with_the_given_probability(chance: float, llm: LLM) -> None:
    """Of 4,000 drafts that are judged or more, five standard deviations are 0.04. It is seeded."""
    accept_by_chance(llm, chance, seed=5)
    drafting = llm.scheduler.drafting
    assert isinstance(drafting, HostDrafting)
    drafting._make_pace = Eager
    run(llm, 20, 200)
    accepted = drafting.accepted_at
    judged = [drafting.num_drafts, *accepted[:-1]]
    assert sum(accepted) / sum(judged) == pytest.approx(chance, abs=0.04)
    assert all(more > less for more, less in zip(judged, accepted, strict=True))
    assert drafting.num_drafted > 3.8 * drafting.num_drafts


def test_a_seed_decides_which_drafts_are_right(model_dir: Path) -> None:
    runs = []
    for seed in (1, 1, 2):
        with make_llm(model_dir, speculative_config=NGRAM, seed=0) as llm:
            accept_by_chance(llm, 0.6, seed)
            tokens, drafting = run(llm), llm.scheduler.drafting
            assert isinstance(drafting, HostDrafting)
            runs.append((drafting.accepted_at, tokens))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_the_engine_decides_how_many_drafts_are_worth_it(llm: LLM) -> None:
    """Where all are wrong, there are hardly any."""
    accept_by_chance(llm, 0, seed=1)
    run(llm, 1, 200)
    assert 4 < llm.stats().drafted_tokens < 40


def test_the_engines_proposer_is_asked_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts."""
    drafting = llm.scheduler.drafting
    assert isinstance(drafting, HostDrafting)
    asked, propose = [], drafting.proposer.propose

    def recording(*args: Any) -> list[list[int]]:
        asked.append(args)
        return propose(*args)

    monkeypatch.setattr(drafting.proposer, "propose", recording)
    accept_by_chance(llm, 1, seed=1)
    run(llm)
    assert len(asked) == 8


def test_the_command_reports_drafts(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda *_: Machine(4e12, 8e14))
    options = (*SHORT, f"--model={model_dir}", DRAFTS, "--dtype=float32", "--acceptance=1")
    assert main(["bench", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["workload"]["acceptance"] == 1.0
    assert result["accepted_tokens"] == result["drafted_tokens"] == 64
    assert result["tokens_per_step"] == 5.0
    assert "a draft is right with probability 1\n" in err
    assert re.search(r"drafts +64 of 64 were right, 5.00 tokens a sequence and step", err)


def test_the_command_reports_that_there_were_no_drafts(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the figures would look like those of right drafts."""
    monkeypatch.setattr(measure, "measure_machine", lambda *_: Machine(4e12, 8e14))
    monkeypatch.setattr(
        TokenCosts, "worthwhile", lambda _, candidates, *__, **___: iter([0] * len(candidates))
    )
    options = (*SHORT, f"--model={model_dir}", DRAFTS, "--dtype=float32", "--acceptance=1")
    assert main(["bench", *options]) == 0
    assert re.search(r"drafts +none, as none was worth its cost", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--acceptance=0.5", '--speculative-config={"method": "grammar"}'],
            "--acceptance needs drafts to accept: add",
        ),
        (["--acceptance=0.5"], "--acceptance needs drafts to accept: add --speculative-config"),
        (["--acceptance=1.5", DRAFTS], "--acceptance must be finite and in [0, 1], got 1.5"),
        (["--acceptance=half", DRAFTS], "cannot read 'half'"),
        (["--acceptance=0.5", DRAFTS, "--repetitive"], "--repetitive and --acceptance exclude"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(["bench", "--shape=qwen3-42m", "--device=cpu", *options])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_without_the_option_nothing_is_replaced(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda *_: Machine(4e12, 8e14))
    monkeypatch.setattr(measure, "accept_by_chance", lambda *_: 1 / 0)
    assert main(["bench", *SHORT, f"--model={model_dir}", DRAFTS, "--dtype=float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["acceptance"] is None
