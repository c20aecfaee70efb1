"""vLLM's options on the command line: further flags of ours, and refusals that say what to use.

The tables are those of `nanovllm.from_vllm.names`, which also serve calls in Python.
An option that is none of ours takes only values that change nothing.
"""

import argparse
from collections.abc import Mapping

from nanovllm.command.field_options import option_flag
from nanovllm.command.spelling import spelled
from nanovllm.config import Config
from nanovllm.from_vllm.flags import WithoutEffect, flags_of
from nanovllm.from_vllm.names.options import ENGINE, SAMPLING
from nanovllm.from_vllm.names.server import SERVER, SHORT
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions
from nanovllm.utils.option import options_of
from nanovllm.utils.other_names import OtherName

TABLES: dict[type, Mapping[str, OtherName]] = {
    ServerOptions: SERVER, Config: ENGINE, SamplingParams: SAMPLING,
}  # the first that has a name decides  # fmt: skip


def add_other_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags of each class with all its options in the parser, unless they are taken."""
    flags = parser._option_string_actions
    for kind, table in TABLES.items():
        fields = {name: one for name, one in options_of(kind).items() if not one.only_python}
        if all(option_flag(kind, name) in flags for name in fields):
            for name, other in table.items():
                _add(parser, kind, name, other)
    for short, name in SHORT.items():
        action = flags.get("--" + name.replace("_", "-"))
        if action is not None:
            flags[short] = action  # not shown: the long name is


def _add(parser: argparse.ArgumentParser, kind: type, name: str, other: OtherName) -> None:
    flag, flags = "--" + name.replace("_", "-"), parser._option_string_actions
    if flag in flags:  # ours, with a meaning of its own
        return
    if other.ours is not None:
        action = flags[option_flag(kind, other.ours)]
        _also(parser, action, flag)
        if isinstance(action, argparse.BooleanOptionalAction):
            _also(parser, action, flag.replace("--", "--no-", 1))
        return
    names = flags_of(name, other)
    parser._add_action(
        WithoutEffect(other, _spelled, option_strings=names, dest=name, help=argparse.SUPPRESS)
    )


def _also(parser: argparse.ArgumentParser, action: argparse.Action, flag: str) -> None:
    """Let the action have another flag, which the help shows too."""
    if flag not in parser._option_string_actions:
        action.option_strings = [*action.option_strings, flag]
        parser._option_string_actions[flag] = action


def _spelled(why: str) -> str:
    """A hint with the flags of options instead of their names."""
    return spelled(why, *TABLES)
