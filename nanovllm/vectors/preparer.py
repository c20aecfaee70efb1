"""Preparer: checks and encodes the prompts of calls that want hidden states.

A plan has the requests, and the function that makes outputs of them when they have ended.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.requests.intake import Accepted, Intake
from nanovllm.engine.requests.request import Request, check_no_error
from nanovllm.engine.run.transfer import Array
from nanovllm.models.config import ModelConfig
from nanovllm.prompt_dicts import salt_number
from nanovllm.prompts import Prompt, prompt_list, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice, check_text, shorten
from nanovllm.vectors.conventions import Conventions, read_conventions
from nanovllm.vectors.pooling import Pooling, PoolingTask
from nanovllm.vectors.rerank import query_prefix

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
Prompts = Prompt | Iterable[Prompt]
Output = TypeVar("Output")


class VectorPlan(NamedTuple, Generic[Output]):
    """Requests to compute, and a function that makes outputs of complete requests, in order.

    `is_by_one`: whether each output belongs to one request, so that a part of them can be made.
    """

    accepted: list[Accepted]
    make: Callable[[list[Request]], list[Output]]
    is_by_one: bool = True

    def outputs(self, requests: list[Request]) -> list[Output]:
        """The outputs of the requests, which have ended; raises if one is not complete."""
        for request in requests:
            check_complete(request)
        return self.make(requests)


def salted(plan: VectorPlan[Output], cache_salt: Any) -> VectorPlan[Output]:
    """The plan with a salt for all prompts that have none of their own."""
    if cache_salt is None:
        return plan
    salt = salt_number(cache_salt)
    return plan._replace(accepted=[replace(one, salt=one.salt or salt) for one in plan.accepted])


def check_complete(request: Request) -> None:
    """Raise if a request has ended before all its states were computed."""
    seq = request.seqs[0]
    check_no_error(seq)
    if seq.finish_reason != "stop":
        raise NotReadyError("a request was aborted before its whole prompt was computed")


class PromptPrefix(NamedTuple):
    """A text before prompts. If the caller asked for it, prompts of token ids are an error."""

    text: str
    is_asked: bool

    def before(self, prompt: Any) -> Any:
        """The prompt with the text before it."""
        source = split_prompt(prompt)[0]
        if isinstance(source, str):
            text = f"{self.text}{source}"
            return {**prompt, "prompt": text} if isinstance(prompt, Mapping) else text
        if self.is_asked:
            raise TypeError(f"{shorten(self.text)} comes before texts only, got token ids")
        return prompt


class Preparer:
    """Prepares prompts for one model. Errors name the prompt or the option, and change nothing.

    `name` is how the user calls the model; its files are in `path`.
    """

    def __init__(self, intake: Intake, model_config: ModelConfig, path: Path, name: str) -> None:
        self.intake, self.model_config = intake, model_config
        self.path, self.name = path, name

    @cached_property
    def conventions(self) -> Conventions:
        """How this model's vectors are made: see `nanovllm.vectors.conventions`."""
        return read_conventions(self.path, self.model_config.hidden_size)

    def pooling(self, asked: Any, allowed: Iterable[Pooling]) -> Pooling:
        """The pooling that a call asks for, or the model's."""
        if asked is None:
            return self.conventions.pooling
        check_choice("pooling", asked, tuple(allowed))
        return asked  # type: ignore[no-any-return]

    def prefix(self, prompt_name: Any, instruction: Any) -> PromptPrefix:
        """The text before prompts: the model's prompt of this name, or an instruction."""
        if instruction is None:
            return PromptPrefix(self.conventions.prefix(prompt_name), prompt_name is not None)
        if prompt_name is not None:
            raise ValueError("prompt_name and instruction exclude each other, got both")
        return PromptPrefix(query_prefix(text_of("instruction", instruction)), True)

    def accept_all(
        self,
        name: str,
        prompts: Any,
        pooling: Pooling,
        prefix: PromptPrefix | None = None,
        params: SamplingParams = PROMPT_ONLY,
    ) -> list[Accepted]:
        """Check and encode all prompts, before anything is queued."""
        return [
            self.accept(f"{name}[{index}]", prompt, PoolingTask(pooling), prefix, params)
            for index, prompt in enumerate(prompt_list(name, prompts))
        ]

    def accept(
        self,
        name: str,
        prompt: Prompt,
        wanted: PoolingTask,
        prefix: PromptPrefix | None = None,
        params: SamplingParams = PROMPT_ONLY,
    ) -> Accepted:
        """Check and encode a prompt, which an error calls `name`."""
        with named(name):
            prompt = prefix.before(prompt) if prefix else prompt
            return self.intake.accept(prompt, params, wanted)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Errors in the block begin with this name of a prompt."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def prompt_params(truncate_prompt_tokens: int | None) -> SamplingParams:
    """The parameters of a request without generated tokens."""
    if truncate_prompt_tokens is None:
        return PROMPT_ONLY
    return replace(PROMPT_ONLY, truncate_prompt_tokens=truncate_prompt_tokens)


def text_of(name: str, value: Any) -> str:
    """A text, which may be in a dict; a TypeError for token ids."""
    source, _, salt = split_prompt(value) if isinstance(value, Mapping) else (value, None, 0)
    if salt:
        raise ValueError(f"{name} must have no cache_salt here; it is an option of the call")
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a text, got {shorten(value)}")
    check_text(name, source)
    return source


def vectors_of(requests: list[Request], dimensions: int | None, normalizes: bool) -> Array:
    """The requests' pooled states, cut and then normalized: [requests, dimensions].

    This uses NumPy, because PyTorch takes milliseconds to wake its threads.
    """
    if not requests:
        return np.empty((0, 0), np.float32)
    vectors = np.stack([request.seqs[0].parts.keeper.result for request in requests])[
        :, :dimensions
    ]
    if normalizes:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.maximum(lengths, 1e-12, dtype=np.float32)
    return vectors
