"""What a person types into `nanovllm chat`, and what is shown besides answers."""

import contextlib
import io
import json
import os
import pty
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm import SamplingParams
from nanovllm.command import generate, pace
from nanovllm.command.chat import Conversation
from nanovllm.command.main import main
from nanovllm.command.options import recommended_options
from nanovllm.command.pace import Pace
from nanovllm.command.waiting_line import waiting_line
from tests.command.test_shown_answers import THINKS, Answering, Terminal

READER = """
from nanovllm.command.message_input import MessageInput
source = MessageInput()
while (message := source.read()) != "end":
    print("got", ascii(message))
"""


def typed(text: str) -> list[str]:
    """The messages that are read while this is typed into a terminal."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", READER])
    seen, end, is_typed = b"", time.monotonic() + LIMIT, False
    with contextlib.suppress(OSError):  # the other end is closed
        while time.monotonic() < end:
            seen += os.read(descriptor, 4096)
            if not is_typed and b">>> " in seen:
                is_typed = os.write(descriptor, f"{text}\nend\n".encode()) > 0
    os.close(descriptor)
    assert os.waitpid(pid, 0)[1] == 0, seen
    return [line[4:] for line in seen.decode().splitlines() if line.startswith("got ")]


def test_a_message_may_have_several_lines() -> None:
    """A paste, Alt+Enter, a backslash; a paste of several lines was one message for each."""
    pasted = "\x1b[200~def f():\n    return 1\n\x1b[201~"
    found = typed(f"{pasted}\na\x1b\rb\nc\\\nd\\\n\ne")
    has_paste = "libedit" not in (__import__("readline").__doc__ or "")
    expected = [r"'def f():\n    return 1'", r"'a\nb'", r"'c\nd'", "'e'"]
    assert found[-2:] == expected[-2:]
    assert found == expected or not has_paste


def conversation(system: str | None = None) -> Conversation:
    llm: Any = Answering(THINKS, "It is 5.")
    return Conversation(llm, SamplingParams(), {}, system)


def test_commands_say_what_they_did(capsys: Any, tmp_path: Path) -> None:
    talk, file = conversation(), tmp_path / "talk.json"
    for line in ("How many?", f"/save {file}", f"/save {file}", "/save", "/reset"):
        talk.handle(line)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"2 messages saved to {file}"
    assert said[1].startswith("nothing is saved: ") and "exists" in said[1]
    assert said[2:] == ["/save needs the name of a file", "a new conversation"]
    assert [one["content"] for one in json.loads(file.read_text())] == ["How many?", "It is 5."]
    for line in ("/system Be brief.", "/reset", "/system"):
        talk.handle(line)
    assert capsys.readouterr().err.splitlines() == [
        "a new conversation, with this system message",
        "a new conversation, with the same system message",
        "a new conversation, with no system message",
    ]
    assert talk.messages == []


def test_the_speed_of_an_answer_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 11.0, 12.5])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(times))  # type: ignore[attr-defined]
    shown = Pace()
    for number in (1, 2, 3):
        shown.add(number)
    assert shown.line() == "6 tokens, the first after 0.50 s, 2.5 tok/s"
    monkeypatch.undo()
    monkeypatch.setenv("TERM", "dumb")
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stderr", stderr)
        conversation().handle("How many?")
        assert stderr.getvalue().startswith("(") == stderr.isatty()


class Recommending(Answering):
    """A model whose generation_config.json recommends parameters."""

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, top_k=7, max_tokens=500)

    def chat_turns(self, talks: Any, params: SamplingParams, **options: Any) -> Any:
        self.params = params
        return super().chat_turns(talks, params, **options)


def test_chats_use_what_the_model_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server does; what is given counts more."""
    llm: Any = Recommending(THINKS, "It is 5.")
    given = {"temperature": 1.0}
    assert recommended_options(llm, given) == {"top_k": 7, "max_tokens": 500}
    monkeypatch.setattr(generate, "open_llm", lambda _: contextlib.nullcontext(llm))
    assert main(["generate", "--chat", "How many?", "--top-k", "3"]) == 0
    assert (llm.params.temperature, llm.params.top_k, llm.params.max_tokens) == (0.25, 3, 500)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_line_is_shown_while_something_takes_long(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And erased; nothing is shown if it is quick, or where there is no terminal."""
    reader, writer = pty.openpty()
    monkeypatch.setattr("nanovllm.command.waiting_line.AFTER", seconds or 60)
    monkeypatch.setenv("TERM", "xterm")
    written: list[bytes] = []
    monkeypatch.setattr("os.write", lambda _, data: written.append(data))
    with os.fdopen(writer, "w") as stderr, os.fdopen(reader):
        monkeypatch.setattr(sys, "stderr", stderr)
        with waiting_line("loading"):
            time.sleep(4 * seconds)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with waiting_line("loading"):
            time.sleep(4 * seconds)
    assert written == ([b"loading", b"\r\x1b[K"] if seconds else [])
