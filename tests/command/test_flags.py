"""Flags of the command: groups in the help, our spelling in errors, and vLLM's names."""

import argparse
import dataclasses
import json
from typing import Any

import pytest

from nanovllm.command.field_options import option_flag
from nanovllm.command.groups import GROUPS, MARK
from nanovllm.command.main import main
from nanovllm.command.options import engine_options, sampling_options
from nanovllm.command.other_flags import TABLES
from nanovllm.command.parser import COMMANDS, make_parser
from nanovllm.command.spelling import spelled, spelled_errors
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions
from nanovllm.utils.option import options_of
from nanovllm.utils.other_names import Values


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return make_parser()


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    (action,) = [one for one in parser._actions if isinstance(one.choices, dict)]
    found: argparse.ArgumentParser = action.choices[command]  # type: ignore[index]
    return found


def mistake(capsys: Any, *argv: str) -> str:
    """The line about a mistake in the command line."""
    try:
        status: Any = main(list(argv))
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return str(err)


@pytest.mark.parametrize("command", [command.NAME for command in COMMANDS])
def test_the_help_has_groups_with_the_common_ones_first(
    parser: argparse.ArgumentParser, command: str
) -> None:
    """A usage of a hundred options is not shown; nothing is missing, and nothing twice."""
    one = parser_of(parser, command)
    assert one.format_usage().startswith(f"usage: nanovllm {command} [OPTION ...]")
    assert one.format_usage().count("\n") == 1
    sizes = {
        group.title or "": sum(action.help != argparse.SUPPRESS for action in group._group_actions)
        for group in one._action_groups
    }
    titles = [title for title, size in sizes.items() if size]
    assert titles == sorted(titles, key=lambda title: MARK in title)
    assert max(size for title, size in sizes.items() if "limits" not in title) <= 16
    flags = [flag for action in one._actions for flag in action.option_strings]
    assert len(flags) == len(set(flags))
    if command == "serve":
        assert titles[2:6] == ["server", "engine", "sampling", f"server{MARK}network"]


def test_vllms_switches_of_the_server(capsys: Any) -> None:
    """A switch takes no value, also one that is refused; what is done anyway is taken."""
    flags = ["--enable-tokenizer-info-endpoint", "--no-enable-tokenizer-info-endpoint"]
    make_parser().parse_args(["serve", "model", *flags])
    words = mistake(capsys, "serve", "model", "--disable-uvicorn-access-log")
    assert "--disable-uvicorn-access-log: send stderr to a file" in words


@pytest.mark.parametrize("kind", [Config, SamplingParams, ServerOptions])
def test_every_field_has_one_group(kind: type) -> None:
    """And no group has a name that is not a field's."""
    names = [name for group in GROUPS[kind].values() for name in group]
    assert len(names) == len(set(names))
    assert set(names) <= set(options_of(kind))


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("max_num_seqs must be >= 1, got 0", (Config,), "--max-num-seqs must be >= 1, got 0"),
        ("seed must be in [0, 9], got -1", (Config,), "--engine-seed must be in [0, 9], got -1"),
        ("seed must be >= 0", (SamplingParams, Config), "--seed must be >= 0"),
        ("n must be 1 with n=2", (SamplingParams,), "--n must be 1 with --n=2"),
        (
            "device='cuda', but no CUDA device is there", (Config,),
            "--device='cuda', but no CUDA device is there",
        ),
        ("the model has a seed", (Config,), "the model has a seed"),
        ("model directory 'max_num_seqs' is", (Config,), "model directory 'max_num_seqs' is"),
        ("see kvcache_block_size=16", (Config,), "see --kvcache-block-size=16"),
        ("enable_lora=False is wrong", (Config,), "--no-enable-lora is wrong"),
        (
            "lora_modules need enable_lora=True (--enable-lora), got False", (Config,),
            "--lora-modules need --enable-lora",
        ),
        ("/max_num_seqs/x, a.max_num_seqs", (Config,), "/max_num_seqs/x, a.max_num_seqs"),
        ("max_num_seqs must be >= 1", (), "max_num_seqs must be >= 1"),
        (
            "/m/config.json: quantization='awq': plain weights", (Config,),
            "/m/config.json: --quantization='awq': plain weights",
        ),
        ("config.json: dtype must be", (Config,), "config.json: dtype must be"),
        (
            "prompts[0]: stop_token_ids: a token id must be", (SamplingParams,),
            "prompts[0]: --stop-token-ids: a token id must be",
        ),
        ("prompts[12]: logprobs must be", (SamplingParams,), "prompts[12]: --logprobs must be"),
        (  # keys of a dict are no flags
            "speculative_config: model='x' is a key; there are model, max_model_len", (Config,),
            "--speculative-config: model='x' is a key; there are model, max_model_len",
        ),
        (
            "speculative_config, draft model 'x': config.json: quantization='fp8'", (Config,),
            "--speculative-config, draft model 'x': config.json: quantization='fp8'",
        ),
    ],
)  # fmt: skip
def test_names_of_options_are_spelled_as_flags(
    text: str, kinds: tuple[type, ...], expected: str
) -> None:
    assert spelled(text, *kinds) == expected


def test_an_error_stays_what_it_is() -> None:
    """Only its text is changed, and only if it has nothing else."""
    for error in (ValueError("max_loras must be 1"), FileNotFoundError("max_loras must be 1")):
        with pytest.raises(type(error)) as caught, spelled_errors(Config):
            raise error
        assert str(error) == "--max-loras must be 1"
        assert caught.value is error
    with pytest.raises(OSError, match="No file: 'max_loras must be 1'"), spelled_errors(Config):
        raise OSError(2, "No file", "max_loras must be 1")


def test_a_model_that_cannot_be_opened_names_the_flag(capsys: Any) -> None:
    """The engine finds it out, not the check of the options."""
    assert main(["generate", "x", "--max-model-len", "9999"]) == 1
    assert "--max-model-len must be at most 4096" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--block-size 32 -tp 2", dict(kvcache_block_size=32, tensor_parallel_size=2)),
        ("--no-enable-prefix-caching", dict(enable_prefix_caching=False)),
        ("--enable-prefix-caching -q fp8", dict(enable_prefix_caching=True, quantization="fp8")),
        ("--gpu-memory-utilization 0.5", dict(gpu_memory_utilization=0.5)),
        ("--async-scheduling", dict(overlap=True)),
        ("--no-async-scheduling", dict(overlap=False)),
        ("--tool-call-parser hermes --enable-auto-tool-choice", dict(tool_parser="hermes")),
        ("--swap-space 4 --trust-remote-code --enable-chunked-prefill", {}),
        ("--hf-overrides {} --pipeline-parallel-size=1 --tokenizer-revision none", {}),
        ("--disable-log-requests --enable-server-load-tracking -asc 1", {}),
    ],
)
def test_vllms_options_have_their_effect(
    parser: argparse.ArgumentParser, flags: str, expected: dict[str, Any]
) -> None:
    args = parser.parse_args(["serve", *flags.split(), "m"])
    assert engine_options(args) == {"model": "m", **expected}
    assert sampling_options(args) == {}
    ours = {"verbose", "debug", "run", "model_name", "model", *options_of(Config)}
    assert set(vars(args)) <= ours, "what has no effect is not kept"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--swap-space x", "--swap-space x: nothing is swapped: a preempted sequence is computed"),
        ("--pipeline-parallel-size 2", "-size 2: see --tensor-parallel-size"),
        ("-pp 2", "-pp 2: see --tensor-parallel-size"),
        ("--no-enable-chunked-prefill", "prompts that exceed --max-num-batched-tokens"),
        ("--rope-theta 1e6", "--rope-theta 1e6: edit config.json"),
        ("--skip-tokenizer-init", "--skip-tokenizer-init: a model without tokenizer files takes"),
        ("--allowed-origins x", "--allowed-origins x: see --cors-origin"),
        ("--best-of 2", "--best-of 2: it must be n, as all samples are returned"),
        ("--block-size 0", "--kvcache-block-size must be >= 1, got 0"),
        ("--swap-spac 0", "did you mean '--swap-space'?"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_use(capsys: Any, flags: str, words: str) -> None:
    assert words in mistake(capsys, "serve", "m", *flags.split())


@pytest.mark.parametrize("kind", TABLES)
def test_every_name_of_the_tables_is_a_flag(
    parser: argparse.ArgumentParser, kind: type, capsys: Any
) -> None:
    """With each of the accepted values nothing changes; no other value passes."""
    serve = parser_of(parser, "serve")
    plain = parser.parse_args(["serve", "m"])
    for name, other in TABLES[kind].items():
        flag = "--" + name.replace("_", "-")
        action = serve._option_string_actions[flag]
        if other.ours is not None:
            assert option_flag(kind, other.ours) in action.option_strings
            continue
        if action.help is not argparse.SUPPRESS:  # the server has an option of this name
            assert name in {field.name for field in dataclasses.fields(ServerOptions)}
            continue
        if kind is not ServerOptions and name in TABLES[ServerOptions]:
            continue  # the server's own values of it
        for value in other.accepts:
            value = value.example if isinstance(value, Values) else value
            if isinstance(value, bool):
                argv = [flag if value else flag.replace("--", "--no-", 1)]
            elif action.nargs == 0 or isinstance(value, tuple):
                continue  # None, of a switch that is not given
            else:
                argv = [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
            assert parser.parse_args(["serve", "m", *argv]) == plain
        if action.nargs is None:
            assert f"{flag} strange-value: " in mistake(capsys, "serve", "m", flag, "strange-value")


def test_the_servers_names_are_those_of_its_options_too() -> None:
    """In Python as on the command line."""
    assert ServerOptions(response_role="assistant") == ServerOptions()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^allowed_origins='x': see cors_origin$"):
        ServerOptions(allowed_origins="x")  # type: ignore[call-arg]
