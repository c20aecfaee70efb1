"""What an exception becomes for a client."""

import asyncio
import pickle

import pytest
import torch

from nanovllm import RankError
from nanovllm.engine.errors import AsleepError, EngineEndedError, EngineFullError, NotReadyError
from nanovllm.engine.remote.connection import EngineConnection
from nanovllm.server.errors import TYPES, APIError, as_api_error, error_response


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (APIError(404, "x", "y"), 404, "y"),
        (EngineFullError("x"), 429, "engine_full"),
        (asyncio.TimeoutError(), 408, "timeout"),
        (ValueError("x"), 400, None),
        (NotReadyError("x"), 503, "not_ready"),
        (RankError("x"), 503, "engine_dead"),
        (EngineEndedError("x"), 503, "engine_dead"),
        (torch.OutOfMemoryError("of an engine that lives"), 500, "internal_error"),
        (RuntimeError("of an engine that lives"), 500, "internal_error"),
    ],
)
def test_statuses_of_errors(error: Exception, status: int, code: str | None) -> None:
    found = as_api_error(error)
    assert (found.status, found.code) == (status, code)
    assert str(error) in str(found)


def test_the_way_out_of_sleep_is_an_errors_class_not_its_words() -> None:
    sent = pickle.loads(pickle.dumps(AsleepError("x")))
    assert str(as_api_error(sent)) == "the engine sleeps; POST /wake_up ends it"
    assert str(as_api_error(NotReadyError("wake_up()"))) == "wake_up()"


def test_clients_repeat_what_may_succeed_and_not_what_takes_long() -> None:
    headers = {status: error_response(APIError(status, "x")).headers for status in TYPES}
    assert {s for s in headers if "retry-after" in headers[s]} == {429, 503}
    never = error_response(as_api_error(KeyError("x"))).headers
    assert never["x-should-retry"] == headers[408]["x-should-retry"] == "false"
    assert {s for s in headers if "x-should-retry" in headers[s]} == {408}


@pytest.mark.parametrize("failure", [RuntimeError("lost"), ValueError("lost"), RankError("lost")])
def test_what_ends_an_engine_is_known_as_that(failure: Exception) -> None:
    connection = EngineConnection.__new__(EngineConnection)
    connection.failure, connection._ended = None, asyncio.Event()
    connection._on_end, connection._questions = (lambda _: None), {}
    connection._loop = None
    connection._end(failure)
    with pytest.raises((RankError, EngineEndedError), match="lost"):
        connection.check()
