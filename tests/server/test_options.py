"""Options of the server that are refused."""

import pickle
from typing import Any

import pytest

from nanovllm.server.options import KEY, ServerOptions, with_key


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://", "a b"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"cors_origin must be \* or like https://example\.com"):
        ServerOptions(cors_origin=["*", origin])


def test_origins_are_taken_as_browsers_send_them() -> None:
    origins = ("*", "https://example.com", "http://localhost:3000", "http://[::1]:80")
    assert ServerOptions(cors_origin=list(origins)).cors_origin == origins


@pytest.mark.parametrize(
    "keys", [["secret "], ["secret\n"], ["ok", ""], ["se\ncret"], "secret", [5]]
)
def test_keys_that_no_request_can_have_are_refused_and_not_shown(keys: Any) -> None:
    with pytest.raises(ValueError, match="api_key must be a list of printable texts") as caught:
        ServerOptions(api_key=keys)
    assert "secret" not in str(caught.value)


def test_the_environments_key_may_end_with_a_files_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, " secret\n")
    assert with_key(ServerOptions(api_key=["a"])).api_key == ("a", "secret")
    for value in ("\n", ""):  # such as a secret that was not set
        monkeypatch.setenv(KEY, value)
        with pytest.raises(ValueError, match="the environment variable NANOVLLM_API_KEY must be"):
            with_key(ServerOptions())


@pytest.mark.parametrize("path", ["api", "/api/", "/"])
def test_a_root_path_has_a_slash_in_front_alone(path: str) -> None:
    with pytest.raises(ValueError, match=f"root_path must be like /path, got '{path}'"):
        ServerOptions(root_path=path)
    assert ServerOptions(root_path="/a/b").root_path == "/a/b"


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="must have different names, got 'a' twice"):
        ServerOptions(served_model_name=["a", "b", "a"])


def test_no_text_about_options_shows_keys() -> None:
    options = ServerOptions(api_key=["secret", "secret2"])
    assert "api_key=<2 keys>" in repr(options) and "secret" not in f"{options} {options.api_key}"
    copy = pickle.loads(pickle.dumps(with_key(options)))
    assert copy == options and copy.api_key == ("secret", "secret2")
    assert "<2 keys>" in repr(copy) and "api_key=None" in repr(ServerOptions())


@pytest.mark.parametrize("host", ["https://a.example", "a.example:80", "*.example", "a b", "::1"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_host must be \* or a name like example\.com"):
        ServerOptions(allowed_host=["*", host])


def test_hosts_are_taken_as_requests_have_them() -> None:
    hosts = ("*", "a.example", "10.0.0.1", "[::1]")
    assert ServerOptions(allowed_host=list(hosts)).allowed_host == hosts
    assert ServerOptions(allowed_host=["A.Example."]).allowed_host == ("a.example",)
