"""Options of the server that are refused."""

import pytest

from nanovllm.server.options import ServerOptions


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://", "a b"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"cors_origin must be \* or like https://example\.com"):
        ServerOptions(cors_origin=["*", origin])


def test_origins_are_taken_as_browsers_send_them() -> None:
    origins = ("*", "https://example.com", "http://localhost:3000", "http://[::1]:80")
    assert ServerOptions(cors_origin=list(origins)).cors_origin == origins
