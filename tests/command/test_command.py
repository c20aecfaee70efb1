"""The command as users run it: a process with its stdin, stdout, stderr and status; a terminal."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT, wait_until

from nanovllm import SamplingParams, __version__
from nanovllm.command import generate, options
from nanovllm.command.main import main
from nanovllm.command.parser import make_parser
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.option_names import OTHER_NAMES, option_name
from nanovllm.utils.option import options_of

COMMAND = [sys.executable, "-m", "nanovllm"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def run(*argv: str, data: bytes = b"") -> Any:
    return subprocess.run(
        [*COMMAND, *argv], input=data, capture_output=True, timeout=LIMIT, env=ENV
    )


def in_process(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of a command that runs in this process."""
    try:
        status = main(list(argv))
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.cold
def test_help_does_not_import_torch() -> None:
    """That would take seconds for a page of text."""
    for argv in (
        "--help",
        "generate --help",
        "chat --help",
        "run-batch --help",
        "info --help",
        "quantize --help",
        "bench --help",
        "bench serve --help",
    ):
        script = (
            "import sys\nfrom nanovllm.command.main import main\n"
            f"try: main({argv.split()})\nexcept SystemExit: pass\n"
            "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LIMIT)
        assert done.returncode == 0
        assert done.stdout.startswith(b"usage: nanovllm")


@pytest.mark.parametrize("command", ["generate", "chat", "run-batch", "info", "bench"])
def test_every_field_is_an_option(capsys: Any, command: str) -> None:
    """With its help text and its default."""
    _, text, _ = in_process(capsys, command, "--help")
    text = " ".join(text.split())
    classes = [Config] if command in ("info", "bench") else [Config, SamplingParams]
    for kind in classes:
        for field in dataclasses.fields(kind):
            if options_of(kind)[field.name].only_python:
                assert f"--{field.name.replace('_', '-')} " not in text
                continue
            name = "engine_seed" if (kind, field.name) == (Config, "seed") else field.name
            assert re.search(rf"--{name.replace('_', '-')}[ ,]", text)
            help_text = options_of(kind)[field.name].help.replace("`", "")
            assert re.search(rf"{re.escape(help_text)}((?! --).)* \(default: ", text)
    assert "(default: 0.9)" in text
    assert ("leaves (default: 64)" in text) == (command in ("generate", "run-batch"))


def test_every_renamed_option_is_of_a_field() -> None:
    for kind, name in OTHER_NAMES:
        assert name in options_of(kind)
    fields = {field.name for kind in (Config, SamplingParams) for field in dataclasses.fields(kind)}
    names = [
        option_name(kind, name) for kind in (Config, SamplingParams) for name in options_of(kind)
    ]
    assert set(names) == fields | {"engine_seed"} and len(names) == len(set(names))


def test_options_are_read_as_the_fields_types() -> None:
    argv = """generate x --temperature 0.5 --top-k 3 --max-tokens none --stop a --stop b --n 2
        --stop-token-ids 1,2 --ignore-eos --no-skip-special-tokens --logit-bias 5=-100,6=1.5
        --bad-words q --seed 3 --engine-seed 4 --no-overlap --max-model-len 100 --device cpu"""
    args = make_parser().parse_args(argv.split())
    assert options.sampling_options(args) == dict(
        temperature=0.5, top_k=3, max_tokens=None, stop=["a", "b"], n=2, stop_token_ids=[1, 2],
        ignore_eos=True, skip_special_tokens=False, logit_bias={5: -100.0, 6: 1.5},
        bad_words=["q"], seed=3,
    )  # fmt: skip
    assert options.engine_options(args) == dict(
        model=EMBEDDED_MODEL, seed=4, overlap=False, max_model_len=100, device="cpu"
    )


@pytest.mark.parametrize(
    "flags",
    [
        "m --lora-modules a=/x b=/y c=/z=1 --enable-lora",
        "--enable-lora --lora-modules a=/x b=/y c=/z=1 m",
        "--lora-modules a=/x --enable-lora --lora-modules b=/y c=/z=1 m",
        "--lora-modules=a=/x b=/y --enable-lora m --lora-modules=c=/z=1",
    ],
)
def test_several_adapters_may_follow_their_flag(flags: str) -> None:
    args = make_parser().parse_args(["serve", *flags.split()])
    assert options.engine_options(args) == dict(
        model="m", enable_lora=True, lora_modules=["a=/x", "b=/y", "c=/z=1"]
    )


def test_the_help_says_that_an_adapter_is_a_name_and_a_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    assert "--lora-modules NAME=PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ("serve m --enable-lora --lora-modules", 2, "--lora-modules: expected one argument"),
        ("serve m --enable-lora --lora-modules --verbose", 2, "expected one argument"),
        ("serve --enable-lora --lora-modules m", 2, "must be like NAME=PATH, got 'm'"),
        ("serve m --api-key x a=b", 2, "unrecognized arguments: a=b"),
        ("", 2, "the following arguments are required: COMMAND"),
        ("fly", 2, "invalid choice: 'fly'"),
        ("generate x --max-tokens many", 2, "argument --max-tokens: cannot read 'many' as N"),
        ("generate x --max-tokens 0", 2, "--max-tokens must be >= 1, got 0"),
        ("generate x --max-num-seqs 0", 2, "--max-num-seqs must be >= 1, got 0"),
        ("generate x --temp 1", 2, "unrecognized arguments: --temp 1"),
        ("generate x --lines", 2, "exclude each other"),
        ("generate -f a -f b", 2, "argument -f/--file: may be given once"),
        ("serve --scheduling-policy fcfs --priority 2", 2, "--scheduling-policy fcfs exclude each"),
        ("chat --policy fcfs --priority=-1", 2, "--priority and --scheduling-policy fcfs exclude"),
        ("chat --n 2", 2, "--n must be 1 in a chat, got 2"),
        ("generate x --logit-bias 5=1,6=2,5=3", 2, "token 5 occurs twice in '5=1,6=2,5=3'"),
        ("chat --chat-template-kwargs 5", 2, "must be a JSON object, got 5"),
        ("generate x --chat --chat-template-kwargs {", 2, "is not valid JSON"),
        ("chat --chat-template-kwargs a=1", 2, """; an example is --chat-template-kwargs '{"""),
        ("""chat --chat-template-kwargs '{"a": 1, "a": 2}'""", 2, "'a' occurs twice"),
        ("""chat --chat-template-kwargs '{"messages": 1}'""", 2, "kwargs must not have 'messages'"),
        ("generate x --system y", 2, "error: --system needs --chat"),
        ("generate x --chat-template-kwargs {}", 2, "error: --chat-template-kwargs needs --chat"),
        ("generate x --logprobs 1", 2, "error: --logprobs needs --json"),
        ("generate x --prompt-logprobs 1", 2, "error: --prompt-logprobs needs --json"),
        ("generate x --stop-token-ids 999", 1, "--stop-token-ids: a token id must be in [0, 263]"),
        ("generate x --json --logprobs 999", 1, "--logprobs must be in [0, 264], got 999"),
        ("generate xyz --max-model-len 2", 1, "(--max-model-len=2 less one to generate), got 3"),
        (
            "generate x --batch-invariant --attention-backend torch",
            2,
            "--batch-invariant needs the",
        ),
        (
            "generate x --device cuda:99",
            1,
            "error: --device='cuda:99', but PyTorch finds no CUDA dev",
        ),
        ("serve --max-loras 3", 2, "--max-loras needs --enable-lora"),
        ("serve --allow-lora-updates", 2, "--allow-lora-updates needs --enable-lora"),
        (
            "serve --policy fcfs --allow-priority",
            2,
            "--allow-priority and --scheduling-policy fcfs",
        ),
        ("serve --max-lora-rank 8 --no-enable-lora", 2, "--max-lora-rank needs --enable-lora"),
        ("serve --uds s --port 9", 2, "--uds cannot be given with a host or a port"),
        ("generate x --quantization dequantize", 1, "is for GGUF files; the checkpoint has plain"),
        ("run-batch x", 2, "the following arguments are required: -o/--output"),
        ("generate -- ''", 2, "a prompt is empty"),
        ("run-batch x -o -", 2, "OUTPUT must be a file"),
        ("run-batch x -o ''", 2, "OUTPUT must be a file"),
        ("run-batch '' -o y", 2, "INPUT must be a file, or - for stdin, got ''"),
        ("run-batch -o y", 2, "INPUT is missing"),
        ("run-batch x -i z -o y", 2, "INPUT and -i exclude each other"),
        ("run-batch -i x -i z -o y", 2, "argument -i/--input-file: may be given once"),
        ("run-batch --input-file '' --output-file y", 2, "INPUT must be a file, or - for stdin"),
        ("serve --served-model-name a b /m", 2, "/m; give the model before --served-model-name"),
        ("serve --generation-config vllm /m", 2, "--generation-config vllm: requests get what"),
        ("info a --model b", 2, "MODEL and --model exclude each other"),
        (
            """info a --speculative-config '{"method": "ngram"}'""",
            2,
            "--speculative-config: this command describes one model",
        ),
        ("quantize a --model b", 2, "MODEL and --model exclude each other"),
        ("quantize a", 2, "--out is required"),
        ("bench --shape qwen3-42m --model x", 2, "--model and --shape exclude each other"),
        ("bench --shape qwen3-42m --load-format auto", 2, "--load-format auto needs --model"),
        ("bench --repeats x", 2, "--repeats: must be at least 1, got x"),
        ("bench --max-model-len 99", 2, "must add up to at most --max-model-len=99, got 2048"),
        ("bench --shape qwen3-42m --max-input-len 4000", 2, "--max-model-len=4096, got 5024"),
        ("bench --max-input-len 4000", 1, "--max-model-len=4096, got 5024"),
        ("bench --shape qwen3-42m --tensor-parallel-size 3", 1, "--tensor-parallel-size=3 cannot"),
        ("generate x --max-model-len 9999", 1, "must be at most 4096, the model's limit, got 9999"),
        ("run-batch /nope/x -o y", 1, "No such file or directory: '/nope/x'"),
        ("generate -f /nope/x", 1, "No such file or directory: '/nope/x'"),
        ("info /nope", 1, "model directory '/nope' does not exist"),
    ],
)
def test_a_mistake_is_one_line(capsys: Any, argv: str, status: int, words: str) -> None:
    got, out, err = in_process(capsys, *shlex.split(argv))
    assert (got, out) == (status, "")
    assert err.startswith("nanovllm: error: ") and err.count("\n") == 1
    assert words in err


def test_a_file_with_a_wrong_type_is_no_internal_error(
    capsys: Any, copy_of_model: Callable[[], Path]
) -> None:
    """What a user can put right is shown without the exception's name and without --debug."""
    file = copy_of_model() / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": "4"}))
    status, _, err = in_process(capsys, "generate", "x", "--model", str(file.parent))
    assert status == 1
    assert err.startswith(f"nanovllm: error: {file}: num_hidden_layers must be an int in ")
    assert err.endswith(", got '4'\n")


def test_a_warning_names_the_flags(capsys: Any) -> None:
    argv = "generate x --max-tokens 1 --num-kvcache-blocks 5 --gpu-memory-utilization 0.5"
    status, _, err = in_process(capsys, *argv.split())
    assert status == 0
    assert "raise --num-kvcache-blocks if it is set, or --cpu-kvcache-gib\n" in err
    assert ": --gpu-memory-utilization has no effect on a CPU; there, --cpu-kvcache-gib is" in err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("generate x --max-token 5", "arguments: --max-token 5; did you mean '--max-tokens'?"),
        ("generate x --max_tokens=5", "arguments: --max_tokens=5; did you mean '--max-tokens'?"),
        ("chat --tempreature 0", "did you mean '--temperature'?"),
        ("bench --num-seq 3", "did you mean '--num-seqs'?"),
        ("genrate x", "did you mean 'generate'?"),
        ("runbatch x", "did you mean 'run-batch'?"),
        ("bench --shape qwen3-0.6", "did you mean 'qwen3-0.6b'?"),
        ("generate x --scheduling mixd", "got 'mixd'; did you mean 'mixed'?"),
        ("--vrebose generate x", "did you mean '--verbose'?"),
    ],
)
def test_the_likely_name_is_suggested(capsys: Any, argv: str, hint: str) -> None:
    status, _, err = in_process(capsys, *argv.split())
    assert status == 2 and hint in err
    command = argv.split()[0]
    asked = f"nanovllm {command}" if command in ("generate", "chat", "bench") else "nanovllm"
    assert f"(see {asked} --help)" in err or "got 'mixd'" in err


@pytest.mark.parametrize("argv", ["generate x --zyx", "fly", "bench --shape gpt"])
def test_no_name_is_suggested_for_another(capsys: Any, argv: str) -> None:
    status, _, err = in_process(capsys, *argv.split())
    assert status == 2 and "did you mean" not in err


def test_common_options_work_before_and_after_the_command(capsys: Any) -> None:
    """The place where one is missing does not reset it."""
    for argv in (["--debug", "generate"], ["generate", "--debug"], ["--debug", "generate", "-v"]):
        assert "Traceback" in in_process(capsys, *argv, "-f", "/nope/x")[2]
    assert "Traceback" not in in_process(capsys, "-v", "generate", "-f", "/nope/x")[2]
    assert make_parser().parse_args(["-v", "generate"]).verbose
    assert make_parser().parse_args(["generate"]).verbose is False


@contextlib.contextmanager
def broken_hub() -> Iterator[tuple[str, list[Any]]]:
    """A server that ends all connections: its URL, and where they came from."""
    tries: list[Any] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # the block has ended
            while True:
                connection, place = listener.accept()
                tries.append(place)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", tries
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most_tries"), [("Qwen/Qwen3-06B", 4), ("./nope", 0)])
def test_a_missing_tokenizer_fails_quickly(name: str, most_tries: int) -> None:
    """At a hub that does not answer, retries for each of its files would take 46 seconds."""
    argv = [*COMMAND, "generate", "x", "--tokenizer", name]
    with broken_hub() as (url, tries):
        env = {**ENV, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, env=env)
    assert done.returncode == 1 and len(tries) <= most_tries
    assert re.search(f"tokenizer (directory )?{name!r} (is not a local|does not)", done.stderr)


def test_characters_that_stdout_cannot_encode_are_escaped() -> None:
    """Random weights soon generate text that is not ASCII."""
    argv = ("generate", "12+34=", "7+8=", "--load-format", "dummy", "--ignore-eos")
    env = {**ENV, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run([*COMMAND, *argv], capture_output=True, timeout=LIMIT, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\x" in done.stdout or b"\\u" in done.stdout


def test_generate_chat_passes_system_message_and_template_options(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    class Recorder:
        get_default_sampling_params = SamplingParams

        def chat(self, conversations: Any, _: Any, **options: Any) -> Any:
            recorded.append((conversations, options))
            raise ValueError("stop here")

        stream_chat = chat

    @contextlib.contextmanager
    def opened(_: Any) -> Iterator[Any]:
        yield Recorder()

    monkeypatch.setattr(generate, "open_llm", opened)
    argv = ("generate", "one", "two", "--chat", "--system", "be brief")
    assert in_process(capsys, *argv, "--chat-template-kwargs", '{"a": 1}')[0] == 1
    system = {"role": "system", "content": "be brief"}
    ((conversations, options),) = recorded
    assert conversations == [[system, {"role": "user", "content": w}] for w in ("one", "two")]
    assert options["chat_template_kwargs"] == {"a": 1}


def test_debug_shows_the_traceback(capsys: Any) -> None:
    _, _, err = in_process(capsys, "generate", "--debug", "-f", "/nope/x")
    assert err.startswith("Traceback") and "nanovllm: error: " in err.splitlines()[-1]


def test_a_bug_is_reported_with_its_type(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a KeyError alone would say nothing."""

    def broken(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(generate, "open_llm", broken)
    status, _, err = in_process(capsys, "generate", "x")
    assert status == 1
    assert err == "nanovllm: error: KeyError: 'x' (--debug shows more)\n"


def test_version_is_the_packages(capsys: Any) -> None:
    assert in_process(capsys, "--version")[:2] == (0, f"nanovllm {__version__}\n")


def test_a_pipe_gets_only_the_answer() -> None:
    done = run("generate", "--temperature", "0", data=b"12+34=\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"46\n", b"")


@pytest.mark.slow
def test_json_has_whole_outputs() -> None:
    """Windows' line ends are not part of the prompts; -v logs what the engine does."""
    argv = ("generate", "--lines", "--json", "-v", "--temperature", "0", "--logprobs", "1")
    done = run(*argv, data=b"\xef\xbb\xbf12+34=\r\n7+8=\r\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == [("12+34=", "46"), ("7+8=", "15")]
    assert {"token_ids", "finish_reason", "logprobs", "metrics", "outputs"} <= set(lines[0])
    log = done.stderr.decode()
    assert re.search(r"nanovllm: Qwen3ForCausalLM on \w+ in \w+, \d\.\d MiB loaded in", log)
    assert re.search(r"nanovllm: KV cache in \w+: \d+ tokens in", log)


@pytest.mark.parametrize("target", [">&-", ">/dev/full"])
def test_a_result_that_cannot_be_written_is_a_failure(target: str) -> None:
    command = shlex.join([*COMMAND, "info", str(EMBEDDED_MODEL)])
    done = subprocess.run(
        ["sh", "-c", f"{command} {target}"], capture_output=True, timeout=LIMIT, env=ENV
    )
    assert (done.returncode, done.stdout) == (1, b"")
    why = "stdout is closed" if target == ">&-" else "[Errno 28] No space left on device"
    assert done.stderr.decode() == f"nanovllm: error: {why}\n"


def test_a_server_does_without_a_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may start it like that."""

    def serve(engine: Any, options: Any, sampling: Any, announce: Callable[[str], None]) -> int:
        announce("http://localhost:8000")
        return 3

    monkeypatch.setattr("nanovllm.server.serve.serve", serve)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["serve", str(EMBEDDED_MODEL)]) == 3


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_quietly() -> None:
    """There is more text than a pipe holds."""
    argv = ["generate", *["12+34="] * 50, "--json", "--logprobs", "100", "--ignore-eos"]
    process = subprocess.Popen(
        [*COMMAND, *argv, "--temperature", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENV,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(10) == b'{"prompt":'
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(LIMIT) == 141


def test_info_needs_no_weights(capsys: Any, tmp_path: Path) -> None:
    config = json.loads((Path(EMBEDDED_MODEL) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ("info", str(tmp_path), "--device", "cpu", "--dtype", "float32")
    status, text, _ = in_process(capsys, *argv, "--attention-backend", "torch")
    assert status == 0
    assert "supported, by 'torch' on cpu" in text and "4,096 bytes a token" in text
    info = json.loads(in_process(capsys, *argv, "--json")[1])
    assert info["num_parameters"] == 821_888
    assert info["kv_bytes_per_token"] == 2 * 4 * 2 * 64 * 4
    free = int(8 * 2**30 * 0.9) - info["weight_bytes"]
    assert info["kv_tokens_by_gib"]["8"] == free // info["kv_bytes_per_token"]
    info = json.loads(in_process(capsys, *argv, "--json", "--kv-cache-dtype", "fp8")[1])
    assert info["kv_bytes_per_token"] == 2 * 4 * 2 * (64 + 2)
    status, text, _ = in_process(capsys, *argv, "--enable-expert-parallel")
    assert status == 1 and "not supported: enable_expert_parallel=True" in text
    info = json.loads(in_process(capsys, *argv, "--json", "--quantization", "int4")[1])
    assert [text.partition(",")[0] for text in info["quantization"]] == ["4-bit", "8-bit"]
    status, _, error = in_process(capsys, *argv, "--quantization", "awq")
    assert status == 1 and "'awq': the checkpoint has plain weights" in error
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    status, _, error = in_process(capsys, *argv)
    assert status == 1 and "architecture 'Other' is not supported" in error


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.environ.update(ENV)
            os.execv(sys.executable, [*COMMAND, *argv])
        size = struct.pack("HHHH", 24, 80, 0, 0)  # rows and columns; a new one has none
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until `pattern` is found; return the text up to its end."""
        end = time.monotonic() + LIMIT
        while (found := re.search(pattern, self.text)) is None:
            assert select.select([self.descriptor], [], [], end - time.monotonic())[0], self.text
            try:
                self.text += os.read(self.descriptor, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                pytest.fail(f"the command has ended: {self.text}")
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def wait_until_asleep(self) -> None:
        """Wait until the command waits for something."""
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until("the command is busy", lambda: ") S " in stat.read_text())

    def status(self) -> int:
        """The exit status; `text` has the rest of the output."""
        with contextlib.suppress(OSError):
            while data := os.read(self.descriptor, 4096):
                self.text += data.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def open_one(*argv: str) -> Terminal:
        terminals.append(Terminal(*argv))
        return terminals[-1]

    yield open_one
    for terminal in terminals:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        terminal.close()


@pytest.mark.slow
def test_a_chat_in_a_terminal(
    open_terminal: Callable[..., Terminal],
) -> None:
    """Ctrl-C in an answer and at the prompt, arrow keys, commands, Ctrl-D."""
    options = "--temperature 0 --ignore-eos --max-model-len 4096 --device cpu"
    terminal = open_terminal("chat", *options.split())
    terminal.wait_for(">>> ")
    terminal.write("12+34=\n")
    terminal.wait_for(r"12\+34=\r\n46")  # without end, as the end of text is ignored
    terminal.write("\x03")
    terminal.wait_for(r" \.\.\.\r\n\(\d+ tokens, .* tok/s\)\r\n>>> ")
    terminal.write("abc")
    terminal.wait_for("abc")
    terminal.wait_until_asleep()  # Python's `input` misses a signal just before it starts to wait
    terminal.write("\x03")
    terminal.wait_for(r"\n>>> ")
    terminal.write("/reset\n")
    terminal.wait_for("a new conversation\r\n>>> ")
    terminal.write("\x1b[A\x1b[A\n")  # up, twice
    terminal.wait_for(r"12\+34=\r\n46")
    terminal.write("\x03")
    terminal.wait_for(r" \.\.\.\r\n\(\d+ tokens, .* tok/s\)\r\n>>> ")
    terminal.write("/help\n")
    assert "/system TEXT" in terminal.wait_for(">>> ")
    terminal.write("/fly\n")
    assert "no command /fly" in terminal.wait_for(">>> ")
    terminal.write("\x04")
    assert terminal.status() == 0


def test_a_template_error_does_not_end_the_chat() -> None:
    """/quit ends it."""
    given = """{"chat_template": "{{ raise_exception('no') }}"}"""
    argv = ("chat", "--chat-template-kwargs", given, "--temperature", "0")
    done = run(*argv, data=b"12+34=\n12+34=\n/quit\n12+34=\n")
    assert (done.returncode, done.stdout) == (0, b"")
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 2 and all("the chat template fails" in line for line in lines)


def test_a_chat_keeps_its_messages() -> None:
    """The messages that the model gets at each turn."""
    from nanovllm.chat.answers import AnswerFormat
    from nanovllm.chat.chat_format import Turn
    from nanovllm.chat.reasoning import Reasoning
    from nanovllm.command.chat import Conversation

    class Recorder:
        def chat_turns(self, conversations: list[list[dict[str, str]]], *_: Any, **__: Any) -> Any:
            turns.append([(message["role"], message["content"]) for message in conversations[0]])
            return [Turn({"prompt_token_ids": [1]}, SamplingParams(), AnswerFormat(Reasoning()))]

        def stream(self, prompts: Any, params: Any) -> Iterator[dict[str, Any]]:
            yield {"text": "<think>so</think>an ", "token_ids": [1], "finish_reason": None}
            yield {"text": "answer", "token_ids": [2], "finish_reason": "stop"}

    turns: list[Any] = []
    talk = Conversation(Recorder(), SamplingParams(), {}, "be brief")  # type: ignore[arg-type]
    for line in ("one", "two", "/reset", "three", "/system", "four"):
        talk.handle(line)
    system, first = ("system", "be brief"), [("user", "one"), ("assistant", "an answer")]
    assert turns == [
        [system, ("user", "one")],
        [system, *first, ("user", "two")],
        [system, ("user", "three")],
        [("user", "four")],
    ]


def test_a_batch_shows_its_progress(open_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """On a terminal."""
    (tmp_path / "in").write_text('{"prompt": "1+1="}\n{"prompt": 5}\n{"prompt": "1+2="}\n')
    terminal = open_terminal("run-batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    terminal.wait_for(r"Batch: 100%.* 3/3 .*1 failed, \S+ tok/s")
    assert terminal.status() == 1
    assert "2 computed, 1 failed, 0 done before" in terminal.text


@pytest.mark.parametrize("more", [[], ["another"], ["--json"]])
def test_an_output_that_ends_with_an_error_is_one_of_the_command(
    capsys: Any, more: list[str]
) -> None:
    structured = ["--structured-outputs", '{"choice": ["ab"]}', "--min-tokens", "9"]
    status, out, err = in_process(capsys, "generate", "x", *more, *structured, "--device", "cpu")
    assert status == 1 or "--json" in more
    assert "ab" in out
    assert "no token to draw" in (out if "--json" in more else err)
    names = [
        f"nanovllm: error: prompt {number}: the parameters, such as structured_outputs"
        for number in (1, 2)
    ]
    assert [name in err for name in names] == [more == ["another"]] * 2


def test_a_chat_says_why_an_answer_breaks_off() -> None:
    structured = ("--structured-outputs", '{"choice": ["ab"]}', "--min-tokens", "9")
    done = run("chat", *structured, "--device", "cpu", data=b"x\ny\n")
    assert (done.returncode, done.stdout) == (0, b"ab\nab\n")
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 2
    because = "the answer breaks off: the parameters, such as structured_outputs"
    assert all(line.startswith(because) for line in lines)


GRAMMAR = "start: a\\na: /b(/"


def test_a_parameter_that_no_conversation_can_have_ends_a_chat() -> None:
    """/reset would not help, so it is not what the message says."""
    done = run("chat", "--stop-token-ids", "999", data=b"x\ny\n")
    assert (done.returncode, done.stdout) == (1, b"")
    expected = b"nanovllm: error: prompts[0]: --stop-token-ids: a token id must be in [0, 263]"
    assert done.stderr.startswith(expected) and b"/reset" not in done.stderr
    done = run("chat", "--max-model-len", "12", data=b"x\n")
    assert done.returncode == 0
    assert b"(--max-model-len=12 less one to generate)" in done.stderr
    assert done.stderr.endswith(b"; /reset starts a new conversation\n")


@pytest.mark.parametrize("command", ["generate x", "generate x y", "chat"])
def test_an_error_in_a_grammar_shows_the_place(command: str) -> None:
    """In all its lines; a chat ends, as it could answer nothing."""
    structured = ("--structured-outputs", f'{{"grammar": "{GRAMMAR}"}}')
    done = run(*command.split(), *structured, "--device", "cpu", data=b"x\ny\n")
    assert (done.returncode, done.stdout) == (1, b"")
    error = done.stderr.decode()
    assert error.startswith("nanovllm: error: ") and error.count("--structured-outputs: ") == 1
    assert "error: unclosed group" in error and "   2 | a: /b(/" in error
