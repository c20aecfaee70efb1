"""How answers are written."""

import json
import math

import pytest

from nanovllm.outputs import TokenLogprob
from nanovllm.server.answering import _sse, json_response


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    """In whole answers, which failed with status 400, as in streams."""
    value = {"a": [TokenLogprob(token_id=1, text="é", logprob=number, rank=1)]}
    whole = json_response(value)
    assert whole.headers["content-type"] == "application/json"
    written = {"a": [{"token_id": 1, "text": "é", "logprob": None, "rank": 1}]}
    assert json.loads(bytes(whole.body)) == written
    assert _sse(value) == b"data: " + bytes(whole.body) + b"\n\n"
