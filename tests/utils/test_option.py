"""Options: defaults are allowed values, and other values are checked."""

import dataclasses
import typing
from typing import Any

import pytest

from nanovllm.bench.serve.options import ServerLoad
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions
from nanovllm.speculative_config import SpeculativeConfig
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.option import options_of

KINDS = [
    Config, ServerLoad, SamplingParams, ServerOptions, SpeculativeConfig, StructuredOutputs,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_default_is_what_its_check_returns(kind: Any) -> None:
    """So that a field which has its default needs no check."""
    for field in dataclasses.fields(kind):
        described = options_of(kind)[field.name]
        if field.default is not dataclasses.MISSING and described.value_of_none is None:
            kept = described.check(field.name, field.default)
            assert kept == field.default
            assert type(kept) is type(field.default)


def test_a_value_that_equals_the_default_but_is_another_is_checked() -> None:
    assert type(SamplingParams(temperature=1).temperature) is float
    with pytest.raises(TypeError, match="temperature"):
        SamplingParams(temperature=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_types_of_options_can_be_read(kind: Any) -> None:
    """Also of an option with a class of its own, in a module that is loaded late."""
    hints = typing.get_type_hints(kind).keys() - {"_"}  # which marks what is given by name only
    assert hints == options_of(kind).keys()
