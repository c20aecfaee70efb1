"""The start of a server: what cannot be is one error, before the model is loaded."""

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from servers import OPTIONS
from waiting import LIMIT

from nanovllm.async_llm import AsyncLLM
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.server.options import ServerOptions
from nanovllm.server.serve import _Life, _listening, _run, open_engine, with_open_files

ENGINE: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
NO_TOKENIZER = "has no tokenizer"


@pytest.fixture
def bare_model(model_dir: Path, tmp_path: Path) -> Path:
    """The random model without a tokenizer."""
    for file in model_dir.iterdir():
        if not file.name.startswith(("tokenizer", "vocab")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_two_servers_do_not_start_at_one_address(tmp_path: Path) -> None:
    """The second one is refused at once, also before the first one accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for options in (ServerOptions(port=port), ServerOptions(uds=str(tmp_path / "socket"))):
        refused = pytest.raises(OSError, match="cannot listen at")
        with _listening(options), refused, _listening(options):
            pass
        with _listening(options):
            pass


def test_why_a_server_cannot_serve_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing else is reported: no task is left."""
    closed = socket.socket()
    closed.close()
    llm = AsyncLLM(EMBEDDED_MODEL, **ENGINE)
    try:
        with pytest.raises((OSError, ValueError)):
            _run(_Life(llm, ServerOptions(), {}).run(closed, pytest.fail))
    finally:
        llm.close()
    assert caplog.text == ""


def test_updates_of_adapters_need_adapters() -> None:
    options = ServerOptions(allow_lora_updates=True)
    with pytest.raises(ValueError, match="allow_lora_updates needs enable_lora=True"):
        open_engine({"model": EMBEDDED_MODEL}, options)


def test_priorities_that_the_policy_refuses_are_not_allowed() -> None:
    """Each request with one would be an error."""
    engine = {"model": EMBEDDED_MODEL, "scheduling_policy": "fcfs"}
    with pytest.raises(ValueError, match="allow_priority and scheduling_policy='fcfs' exc"):
        open_engine(engine, ServerOptions(allow_priority=True))


def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(bare_model: Path) -> None:
    (bare_model / "model.safetensors").write_bytes(b"")  # which loading would find
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "serve", *OPTIONS, str(bare_model), "--port", "0"],
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    message = f"nanovllm: error: {bare_model} {NO_TOKENIZER}; --tokenizer names one\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_model_without_a_tokenizer_is_one_warning(
    bare_model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the engine's process or of its caller, not of both."""
    AsyncLLM(str(bare_model), **ENGINE).close()
    assert (capfd.readouterr().err + caplog.text).count(NO_TOKENIZER) == 1


def test_a_connection_is_kept_for_longer_than_a_proxy_keeps_it() -> None:
    """uvicorn's default is 5 seconds."""
    with closing(AsyncLLM(EMBEDDED_MODEL, **ENGINE)) as llm:
        config = _Life(llm, ServerOptions(), {})._server.config
        assert config.timeout_keep_alive > 60, "nginx's"


@pytest.mark.parametrize(
    ("limits", "most", "is_raised"), [((256, 9000), 8192, True), ((256, 1000), 488, True),
                                      ((9000, 9000), 8192, False)]
)  # fmt: skip
def test_connections_have_open_files(
    limits: tuple[int, int], most: int, is_raised: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    resource = pytest.importorskip("resource")
    set_to: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert with_open_files(ServerOptions()).max_connections == most
    assert set_to == ([(most + 512, limits[1])] if is_raised else [])
    assert ("at most 488 connections are open at a time, not 8192" in caplog.text) == (most < 8192)


def test_a_system_that_raises_no_limit_has_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, if its hard limit is unlimited; the server did not start."""
    resource = pytest.importorskip("resource")

    def refuse(*_: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert with_open_files(ServerOptions()).max_connections == 488
