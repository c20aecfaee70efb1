"""The option `speculative_config`: vLLM's keys, checked, in Python and on the command line."""

import dataclasses
import pickle
from typing import Any

import pytest

from nanovllm.command.main import main
from nanovllm.config import Config
from nanovllm.speculative_config import MOST_FORCED, SpeculativeConfig

NGRAM = {"method": "ngram"}
DRAFT = {"method": "draft_model", "model": "m"}
EAGLE = {"method": "eagle3", "model": "m"}
GRAMMAR = {"method": "grammar"}
NONE = {"method": "none"}


def config(**keys: Any) -> Any:
    return Config("m", speculative_config=keys).speculative_config  # type: ignore[arg-type]


def test_keys_have_defaults() -> None:
    assert config(**NGRAM) == SpeculativeConfig("ngram", 4, 4, 1, None)
    assert Config("m").speculative_config is None


def test_a_model_without_a_method_is_a_draft_model() -> None:
    assert config(model="m") == config(**DRAFT) == SpeculativeConfig("draft_model", model="m")
    assert config(**DRAFT, quantization="awq_marlin", revision="main").quantization == "awq"


def test_a_step_has_more_drafts_of_a_grammar() -> None:
    """Which are right."""
    assert config(**GRAMMAR) == SpeculativeConfig("grammar", MOST_FORCED)
    assert config(**GRAMMAR, num_speculative_tokens=4).num_speculative_tokens == 4


@pytest.mark.parametrize("keys", [NGRAM, DRAFT, EAGLE, GRAMMAR, NONE])
def test_a_config_survives_copies(keys: dict[str, Any]) -> None:
    """Workers get it pickled, benchmarks as a dict."""
    made = Config("m", speculative_config=dict(keys, num_speculative_tokens=3))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(made)) == made
    assert Config(**dataclasses.asdict(made)) == made
    assert dataclasses.replace(made, seed=1).speculative_config == made.speculative_config


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (dict(method="eagle"), ValueError, "'grammar', 'none', got 'eagle'; did you mean"),
        (dict(method=None), ValueError, "method must be one of 'ngram', 'draft_model', 'eagle3'"),
        ({}, ValueError, 'a "method" of ngram, draft_model, eagle3, mtp, grammar, none, got'),
        (dict(method="draft_model"), ValueError, 'needs "model", a path or a hub id'),
        (dict(method="eagle3"), ValueError, 'method "eagle3" needs "model", a path or a hub id'),
        (dict(EAGLE, max_model_len=9), ValueError, "is a key of method 'draft_model', not"),
        (dict(EAGLE, quantization="fp8"), ValueError, "='fp8' is a key of method 'draft_model'"),
        (dict(EAGLE, prompt_lookup_min=2), ValueError, "a key of method 'ngram', not of 'eagle3'"),
        (dict(DRAFT, model=5), TypeError, "model must be a path or a hub id, got 5"),
        (
            dict(DRAFT, prompt_lookup_max=3), ValueError,
            "prompt_lookup_max=3 is a key of method 'ngram', not of 'draft_model'",
        ),
        (
            dict(NGRAM, model="m"), ValueError,
            "model='m' is a key of method 'draft_model' or 'eagle3', not of 'ngram'",
        ),
        (
            dict(GRAMMAR, model="m"), ValueError,
            "model='m' is a key of method 'draft_model' or 'eagle3', not of 'grammar'",
        ),
        (dict(NONE, prompt_lookup_max=3), ValueError, "a key of method 'ngram', not of 'none'"),
        (dict(NGRAM, max_model_len=50), ValueError, "is a key of method 'draft_model'"),
        (dict(DRAFT, quantization="int3"), ValueError, "quantization must be one of"),
        (dict(DRAFT, max_model_len=1), ValueError, "max_model_len must be >= 2, got 1"),
        (dict(NGRAM, num_tokens=1), TypeError, "unknown key 'num_tokens'; did you mean"),
        (dict(NGRAM, draft_tensor_parallel_size=1), TypeError, "there are method, num_spec"),
        (dict(NGRAM, num_speculative_tokens=0), ValueError, "must be in [1, 64], got 0"),
        (dict(NGRAM, num_speculative_tokens="4"), TypeError, "must be an int in [1, 64], got '4'"),
        (dict(NGRAM, num_speculative_tokens=None), TypeError, "must be an int in [1, 64]"),
        (dict(NGRAM, prompt_lookup_max=33), ValueError, "must be in [1, 32], got 33"),
        (dict(NGRAM, prompt_lookup_min=True), TypeError, "must be an int in [1, 32], got True"),
        (
            dict(NGRAM, prompt_lookup_min=3, prompt_lookup_max=2), ValueError,
            "prompt_lookup_min must be at most prompt_lookup_max, got 3 and 2",
        ),
    ],
)  # fmt: skip
def test_bad_keys_are_refused_by_name(
    keys: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        config(**keys)
    assert str(raised.value).startswith("speculative_config") and text in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read '{' as JSON"),
        ("{'method': 'ngram'}", "Expecting property name enclosed in double quotes"),
        ("ngram", """; an example is --speculative-config '{"method": "ngram"}' (see"""),
        ('{"method": "ngram", "method": "eagle3"}', "as JSON: 'method' occurs twice; an example"),
        ("[" * 100_000, "as JSON: it is nested too deeply"),
        ('"ngram"', "--speculative-config must be a dict such as"),
        (
            '{"method": "medusa"}',
            "method must be one of 'ngram', 'draft_model', 'eagle3', 'mtp', 'grammar',",
        ),
    ],
)
def test_the_command_line_takes_json(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["generate", "1+1=", "--speculative-config", text]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
