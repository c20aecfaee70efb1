"""vLLM's `EngineArgs` and `AsyncEngineArgs`: the options of an engine that is made later."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from nanovllm.config import Config, ModelName, asked_by
from nanovllm.from_vllm.flags import WithoutEffect, flags_of
from nanovllm.from_vllm.names.options import ENGINE
from nanovllm.utils.option import options_of

if TYPE_CHECKING:
    from nanovllm.from_vllm.async_llm import AsyncLLMEngine
    from nanovllm.llm import LLM

T = TypeVar("T", bound="EngineArgs")
P = TypeVar("P", bound="argparse._ActionsContainer")


class EngineArgs(Config):
    """The options of an `LLM`, by our names or vLLM's, checked when it is made.

    `LLMEngine.from_engine_args(args)` and `LLM(**dataclasses.asdict(args))` make engines of it.
    """

    def __init__(self, model: ModelName = None, **options: Any) -> None:
        super().__init__(**vars(asked_by(self, model, options)))

    __init__.__wrapped__ = Config.__init__  # type: ignore[attr-defined]  # where help looks

    def make_llm(self) -> "LLM":
        """The `LLM` with these options."""
        from nanovllm.llm import LLM

        return LLM(**self.options)

    def make_async(self) -> "AsyncLLMEngine":
        """The `AsyncLLMEngine` with these options."""
        from nanovllm.from_vllm.async_llm import AsyncLLMEngine

        return AsyncLLMEngine(**self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in options_of(Config)}

    @classmethod
    def from_cli_args(cls: type[T], args: argparse.Namespace) -> T:
        """The options that a parser with `add_cli_args` has read, or that have defaults there.

        Defaults may have vLLM's names: an option that is given by ours replaces them.
        """
        own = [name for name in options_of(Config) if name in args]
        others = [n for n, one in ENGINE.items() if n in args and not {n, one.ours} & {*own}]
        return cls(**{name: getattr(args, name) for name in (*own, *others)})

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Add the options as flags with dashes, to a parser or to a group of one.

        vLLM's other names are flags, too; those of missing options take the values that change
        nothing. An option that is not given is not in the namespace.
        """
        for field in dataclasses.fields(Config):
            described = options_of(Config)[field.name]
            names = [
                field.name,
                *(name for name, other in ENGINE.items() if other.ours == field.name),
            ]
            kinds = {field.type, *get_args(field.type)}
            reader: dict[str, Any] = {"type": json.loads}
            if bool in kinds:
                reader = {"action": argparse.BooleanOptionalAction}
            elif kind := kinds & {int, float, str}:
                reader = {"type": kind.pop()}
            elif described.rule.pairs:
                reader = {"nargs": "+"}
            parser.add_argument(
                *("--" + name.replace("_", "-") for name in names), default=argparse.SUPPRESS,
                dest=field.name, help=described.help.replace("%", "%%"), **reader,
            )  # fmt: skip
        for name, other in ENGINE.items():
            if other.ours is None:
                parser.add_argument(
                    *flags_of(name, other), dest=name, help=argparse.SUPPRESS,
                    action=WithoutEffect, other=other,
                )  # fmt: skip
        return parser


class AsyncEngineArgs(EngineArgs):
    """The options of an `AsyncLLM`: `AsyncLLMEngine.from_engine_args(args)`."""
