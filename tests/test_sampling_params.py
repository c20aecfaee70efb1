"""SamplingParams: bad values are refused by name; lists are copied."""

import dataclasses
import math
import time
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams, listed_values
from nanovllm.engine.schedule.sequence import Sequence

BAD: dict[str, tuple[str, list[tuple[Any, type[Exception]]]]] = {
    "temperature": (
        ">= 0.0",
        [
            (-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError),
            (10**400, ValueError), ("1", TypeError), (True, TypeError), (None, TypeError),
        ],
    ),
    "max_tokens": (
        ">= 1",
        [
            (0, ValueError), (-1, ValueError), (1.5, TypeError), (2.0, TypeError),
            ("4", TypeError), (True, TypeError),
        ],
    ),
    "n": ("in [1, 16384]", [(0, ValueError), (10**9, ValueError), (1.0, TypeError)]),
    "prompt_logprobs": (">= 0", [(-1, ValueError), (1.0, TypeError), (True, TypeError)]),
    "priority": (
        f"in [{-(2**63)}, {2**63 - 1}]",
        [(2**63, ValueError), (0.5, TypeError), (True, TypeError), (None, TypeError)],
    ),
    "logprobs": (">= 0", [(-1, ValueError), (1.0, TypeError), (True, TypeError)]),
    "min_tokens": (">= 0", [(-1, ValueError), (0.5, TypeError), (None, TypeError)]),
    "top_k": (">= -1", [(-2, ValueError), (1.0, TypeError), (None, TypeError)]),
    "top_p": (
        "in (0.0, 1.0]",
        [(0.0, ValueError), (1.01, ValueError), (math.nan, ValueError), ("1", TypeError)],
    ),
    "min_p": ("in [0.0, 1.0]", [(-0.1, ValueError), (1.5, ValueError), (None, TypeError)]),
    "repetition_penalty": (
        "in [0.01, 100.0]",
        [(0.0, ValueError), (-1.0, ValueError), (math.inf, ValueError), ("1", TypeError)],
    ),
    "presence_penalty": ("in [-2.0, 2.0]", [(-2.1, ValueError), (3, ValueError), ("1", TypeError)]),
    "frequency_penalty": ("in [-2.0, 2.0]", [(-2.1, ValueError), (3, ValueError), ([], TypeError)]),
    "logit_bias": (
        "numbers in [-100.0, 100.0]", [([1], TypeError), ("a", TypeError), (5, TypeError)],
    ),
    "allowed_token_ids": (
        "a list of token ids", [(5, TypeError), ("12", TypeError), ([], ValueError)],
    ),
    "bad_words": (
        "a list of texts",
        [
            ("word", TypeError), (5, TypeError), ({"a": 1}, TypeError), ([5], TypeError),
            ([""], ValueError),
        ],
    ),
    "ignore_eos": ("True or False", [(1, TypeError), ("yes", TypeError), (None, TypeError)]),
    "stop": (
        "a list of texts", [(5, TypeError), ([5], TypeError), ([""], ValueError), ("", ValueError)],
    ),
    "truncate_prompt_tokens": (
        "-1 or >= 1", [(0, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
    ),
    "hidden_states": ("True or False", [(1, TypeError), (None, TypeError)]),
    "logits_processors": (
        "a list of callables", [(5, TypeError), ("a", TypeError), (len, TypeError)],
    ),
    "detokenize": ("True or False", [(1, TypeError), (None, TypeError)]),
    "skip_reading_prefix_cache": ("True or False", [(1, TypeError), ("yes", TypeError)]),
    "output_kind": ("a RequestOutputKind", [(1, ValueError), ("whole", ValueError)]),
    "include_stop_str_in_output": ("True or False", [(1, TypeError), (None, TypeError)]),
    "skip_special_tokens": ("True or False", [(1, TypeError), (None, TypeError)]),
    "seed": (
        f"in [0, {2**63 - 1}]",
        [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError)],
    ),
    "stop_token_ids": (
        "a list of token ids",
        [(5, TypeError), ("12", TypeError), (True, TypeError)],
    ),
    "structured_outputs": (
        "a StructuredOutputs or a dict of its options", [(5, TypeError), ("json", TypeError)]
    ),
}  # fmt: skip
CASES = [
    pytest.param(name, allowed, value, error, id=f"{name}={value!r:.12}")
    for name, (allowed, bad) in BAD.items()
    for value, error in bad
]


def test_every_field_is_checked() -> None:
    """A new parameter needs a check of its values."""
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD)


@pytest.mark.parametrize(("name", "allowed", "value", "error"), CASES)
def test_bad_value_is_refused(name: str, allowed: str, value: Any, error: type[Exception]) -> None:
    """The error has the name, the range and the value: max_tokens=0, temperature=nan, ..."""
    with pytest.raises(error) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert allowed in message
    assert str(value).strip("[]")[:15] in message


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        ({-1: 1.0}, ValueError, "logit_bias token id must be >= 0, got -1"),
        ({"5": 1.0}, TypeError, "logit_bias token id must be an int >= 0, got '5'"),
        ({5: 101.0}, ValueError, "logit_bias must be finite and in [-100.0, 100.0], got 101.0"),
        ({5: -math.inf}, ValueError, "in [-100.0, 100.0], got -inf"),
        ({4: 1.0, 5: math.nan, 6: 1.0}, ValueError, "in [-100.0, 100.0], got nan"),
        ({5: math.nan, 6: 10**400}, ValueError, "in [-100.0, 100.0], got nan"),
        ({5: 10**400}, ValueError, "logit_bias must be finite and in [-100.0, 100.0], got 1000000"),
        ({5: True}, TypeError, "logit_bias must be a number in [-100.0, 100.0], got True"),
        ({True: 1.0}, TypeError, "logit_bias token id must be an int >= 0, got True"),
        ({5: "1"}, TypeError, "logit_bias must be a number in [-100.0, 100.0], got '1'"),
    ],
)
def test_bad_bias_is_refused(bias: Any, error: type[Exception], words: str) -> None:
    """Biases are not silently clamped."""
    with pytest.raises(error) as caught:
        SamplingParams(logit_bias=bias)
    assert words in str(caught.value)


def test_many_biases_are_not_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_values, "check_float", None)
    biases = {token_id: (token_id % 7) / 2 if token_id % 2 else 3 for token_id in range(99)}
    params = SamplingParams(logit_bias=biases)
    assert params.logit_bias == biases
    assert {type(bias) for bias in params.logit_bias.values()} == {float}


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_an_unpaired_surrogate_is_refused(name: str) -> None:
    """No tokenizer accepts it."""
    with pytest.raises(ValueError, match=f"{name} is not valid Unicode text"):
        SamplingParams(**{name: ["\ud800"]})


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_tokens must be in \[0, 5\], got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=600, max_tokens=None).min_tokens == 600


@pytest.mark.parametrize(
    ("bad_id", "error"),
    [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("a", TypeError), (None, TypeError),
     ([1], TypeError)],
)  # fmt: skip
def test_bad_stop_token_id_is_refused(bad_id: Any, error: type[Exception]) -> None:
    """No token can equal such an id, so the request would silently never stop there."""
    with pytest.raises(error, match=r"stop_token_ids must be .*>= 0, got ") as caught:
        SamplingParams(stop_token_ids=[2, bad_id])
    assert str(bad_id) in str(caught.value)


def test_defaults_are_the_documented_ones_and_valid() -> None:
    defaults: dict[str, Any] = {
        "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_tokens": 64,
        "min_tokens": 0, "stop": None, "stop_token_ids": None, "ignore_eos": False, "seed": None,
        "n": 1, "logprobs": None, "prompt_logprobs": None, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None,
        "allowed_token_ids": None, "bad_words": None, "include_stop_str_in_output": False,
        "skip_special_tokens": True, "priority": 0, "structured_outputs": None,
        "truncate_prompt_tokens": None, "hidden_states": False, "logits_processors": None,
        "detokenize": True, "skip_reading_prefix_cache": None, "output_kind": None,
    }  # fmt: skip
    assert SamplingParams(**defaults) == SamplingParams()
    assert dataclasses.asdict(SamplingParams()) == defaults


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_a_field_is_set_with_the_checks_of_making() -> None:
    """vLLM's chat example sets `max_tokens`; a value that is refused changes nothing."""
    params = SamplingParams(max_tokens=9, min_tokens=3, stop="a")
    params.max_tokens = 20  # type: ignore[misc]
    params.stop = ["b", "c"]  # type: ignore[misc]
    assert params == SamplingParams(max_tokens=20, min_tokens=3, stop=("b", "c"))
    for name, value in (("max_tokens", 2), ("max_tokens", 0), ("top_p", "x"), ("stop", "")):
        with pytest.raises((TypeError, ValueError), match=name.replace("max_tokens", "m.*_tokens")):
            setattr(params, name, value)
    assert params == SamplingParams(max_tokens=20, min_tokens=3, stop=("b", "c"))


def test_a_clone_changes_alone() -> None:
    params = SamplingParams(seed=1)
    clone = params.clone()
    assert clone == params and clone is not params
    clone.seed = 2  # type: ignore[misc]
    assert (params.seed, clone.seed) == (1, 2)


def test_stop_token_ids_are_copied() -> None:
    """If the caller changes its list later, running requests stop at the same tokens."""
    stop_token_ids = [7, 8]
    params = SamplingParams(stop_token_ids=stop_token_ids)
    stop_token_ids.append(9)
    assert params.stop_token_ids == (7, 8)


@pytest.mark.parametrize(
    "given",
    [(7, 8), np.array([7, 8]), iter([7, 8]), range(7, 9)],
    ids=["tuple", "array", "iterator", "range"],
)
def test_any_iterable_of_ids_becomes_a_tuple(given: Any) -> None:
    """A kept array has an ambiguous truth value; a kept iterator is empty at its second use."""
    params = SamplingParams(stop_token_ids=given)
    assert params.stop_token_ids == (7, 8)
    assert [type(token_id) for token_id in params.stop_token_ids or ()] == [int, int]


def test_zero_temperature_and_ends_of_ranges_are_allowed() -> None:
    """Greedy decoding must not divide by the temperature; bounds are not off by one."""
    params = SamplingParams(temperature=0, max_tokens=1, seed=2**63 - 1, stop_token_ids=[])
    assert (params.temperature, params.max_tokens, params.seed) == (0, 1, 2**63 - 1)
    assert not SamplingParams(
        top_p=1, min_p=0, top_k=0, repetition_penalty=1, presence_penalty=0, bad_words=[],
        logit_bias={}, max_tokens=None,
    ).narrows  # fmt: skip
    assert SamplingParams(seed=0).seed == 0


def test_numpy_numbers_become_numbers() -> None:
    """An np.int8 that is kept would overflow: 100 + np.int8(100) is -56."""
    params = SamplingParams(max_tokens=np.int8(100), seed=np.int8(5), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.max_tokens, params.seed, params.temperature) == (100, 5, 0.5)
    assert Sequence([0] * 100, params).max_num_tokens == 200
    assert (type(params.max_tokens), type(params.seed)) == (int, int)


def test_parameters_can_be_hashed_compared_and_replaced() -> None:
    """As keys of a dict, with any field."""
    given = dict(stop=["a"], stop_token_ids=[1, 2], logit_bias={1: 2.0, 3: -1.0}, bad_words=["b"])
    params, same = SamplingParams(**given), SamplingParams(**given)  # type: ignore[arg-type]
    assert {params: "first"}[same] == "first"
    assert len({params, same, SamplingParams()}) == 2
    with pytest.raises(AttributeError, match="did you mean 'max_tokens'"):
        params.max_token = 5  # type: ignore[attr-defined]
    assert dataclasses.replace(params, max_tokens=5).max_tokens == 5
    assert params.max_tokens == 64


def test_a_long_list_of_ids_is_checked_quickly() -> None:
    """An id at a time, 100,000 took 90 ms, in which a server does nothing else."""
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        params = SamplingParams(allowed_token_ids=range(100_000))
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.04 and params.allowed_token_ids == tuple(range(100_000))


def test_cuts_do_not_narrow_a_greedy_choice() -> None:
    """The most likely token is never left out, so that no filter has to run."""
    cuts: dict[str, Any] = dict(top_k=5, top_p=0.5, min_p=0.1)
    assert SamplingParams(**cuts).narrows
    assert not SamplingParams(temperature=0, **cuts).narrows
