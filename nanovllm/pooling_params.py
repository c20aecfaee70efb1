"""PoolingParams: vLLM's form of the options of `embed`, `encode` and `score`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import KEPT
from nanovllm.utils.checks import shorten
from nanovllm.utils.option import (
    NOTHING,
    TRUE_OR_FALSE,
    by_name,
    check_options,
    int_range,
    option,
    options_of,
)

if TYPE_CHECKING:
    from nanovllm.utils.other_names import OtherName


def _other_names() -> "Mapping[str, OtherName]":
    """vLLM's other names of parameters."""
    from nanovllm.from_vllm.names.options import POOLING

    return POOLING


@by_name("pooling parameter", _other_names)
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Options of a call, as `pooling_params`; docs/embeddings.md explains them. None sets nothing.

    vLLM's `use_activation` is another name of `normalize`.
    """

    dimensions: int | None = option(
        None, "keep the first ones of a vector", int_range(1), none=NOTHING
    )
    normalize: bool | None = option(
        None, "divide a vector by its length", TRUE_OR_FALSE, none=NOTHING
    )
    truncate_prompt_tokens: int | None = option(
        None, "keep this many last tokens of longer prompts", KEPT, none=NOTHING
    )

    def __post_init__(self) -> None:
        check_options(self)


def with_pooling_params(call: str, params: Any, **given: Any) -> tuple[Any, ...]:
    """The values of a call's options in order: those `given`, or those set in `params`.

    An option that is set in both is an error, and so is one that the call does not have.
    """
    if params is None:
        return (*given.values(),)
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be a PoolingParams, got {shorten(params)}")
    for name in options_of(PoolingParams):
        value = getattr(params, name)
        if value is None:
            continue
        if name not in given:
            raise ValueError(f"pooling_params: {name} must be None for {call}, got {value}")
        if given[name] is not None:
            raise ValueError(f"{name} and pooling_params with {name}={value}; give one of them")
        given[name] = value
    return (*given.values(),)
