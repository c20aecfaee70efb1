"""What an exception becomes for a client."""

import asyncio

import pytest
import torch

from nanovllm import RankError
from nanovllm.async_llm import EngineFullError
from nanovllm.engine.errors import EngineEndedError, NotReadyError
from nanovllm.engine.remote.connection import Connection
from nanovllm.server.errors import APIError, as_api_error


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
        (torch.OutOfMemoryError("of an engine that lives"), 500, None),
        (RuntimeError("of an engine that lives"), 500, None),
    ],
)
def test_statuses_of_errors(error: Exception, status: int, code: str | None) -> None:
    found = as_api_error(error)
    assert (found.status, found.code) == (status, code)
    assert str(error) in str(found)


@pytest.mark.parametrize("failure", [RuntimeError("lost"), ValueError("lost"), RankError("lost")])
def test_what_ends_an_engine_is_known_as_that(failure: Exception) -> None:
    connection = Connection.__new__(Connection)
    connection.failure, connection._ended = None, asyncio.Event()
    connection._on_end, connection._questions = (lambda _: None), {}
    connection._end(failure)
    with pytest.raises((RankError, EngineEndedError), match="lost"):
        connection.check()
