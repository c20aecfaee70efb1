"""Outputs are dicts and have attributes; both see the same values."""

import copy
import json
import pickle
from typing import Any

import pytest
from reference import make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.outputs import (
    Completion,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(EMBEDDED_MODEL, max_model_len=64)


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    params = SamplingParams(
        n=2, temperature=1.0, seed=1, max_tokens=8, logprobs=1, prompt_logprobs=1
    )
    (output,) = llm.generate("12+34=", params, use_tqdm=False)
    return output


def check(record: Any) -> None:
    """Every item is an attribute, however deep."""
    if isinstance(record, dict):
        for name, value in record.items():
            if not isinstance(record, Completion) or "logprobs" not in name:  # dicts by token id
                assert getattr(record, name) is value
            check(value)
    elif isinstance(record, list):
        for value in record:
            check(value)


def test_every_item_is_an_attribute(output: RequestOutput) -> None:
    check(output)
    assert [type(sample) for sample in output.outputs] == [CompletionOutput] * 2
    assert output.outputs[0].text == output.outputs[0]["text"] == output.text
    assert output.outputs[1].index == 1
    assert type(output.metrics) is RequestMetrics
    assert output.metrics.time_to_first_token < output.metrics.end_to_end_time
    (own, *_), *_ = output["logprobs"]
    assert type(own) is type(output["prompt_logprobs"][1][0]) is TokenLogprob
    assert own.logprob == own["logprob"]


def test_vllms_names_of_the_same_values(output: RequestOutput) -> None:
    token = output["logprobs"][0][0]
    assert token.decoded_token == token.text == token["text"]
    assert output.finished is True
    assert "finished" not in output
    assert "decoded_token" not in token


def test_events_and_statistics_have_attributes(llm: LLM) -> None:
    for event in llm.stream("7+8=", SamplingParams(temperature=0, max_tokens=4)):
        check(event)
        assert event.index == event.sample == 0
    assert llm.stats().num_finished == llm.stats()["num_finished"] > 0


def test_copies_and_pickles_are_equal_and_of_the_same_type(output: RequestOutput) -> None:
    for other in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert type(other) is RequestOutput
        assert other == output
        assert other.outputs[0].text == output.text
    assert json.loads(json.dumps(output)) == output


def test_setting_an_attribute_sets_the_item() -> None:
    metrics = RequestMetrics(
        queue_time=None, time_to_first_token=None, time_per_output_token=None, end_to_end_time=1.0
    )
    metrics.queue_time = 0.5
    assert metrics["queue_time"] == metrics.queue_time == 0.5
    metrics["queue_time"] = 0.25
    assert metrics.queue_time == 0.25


def test_an_unknown_field_is_an_attribute_error_with_the_nearest(output: RequestOutput) -> None:
    with pytest.raises(AttributeError, match="no field 'prompt_tokens_ids'; did you mean 'prompt_"):
        _ = output.prompt_tokens_ids
    with pytest.raises(AttributeError, match=r"RequestOutput has no field 'lora'$"):
        _ = output.lora
    assert not hasattr(output, "lora")


def test_the_fields_are_completed_in_notebooks(output: RequestOutput) -> None:
    """By `dir`, which has the methods and properties too."""
    assert {"text", "token_ids", "finished", "items"} <= set(dir(output))
