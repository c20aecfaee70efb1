"""Processors: a request's callables that change its logits before anything else does."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from nanovllm.engine.requests.fixed_ids import FixedIds, OutputIds
from nanovllm.engine.schedule.failures import shown
from nanovllm.engine.schedule.sequence import Sequence

OTHERS = (
    "; one of transformers takes (input_ids, scores): wrap it in a function of (prompt_token_ids,"
    " token_ids, logits), as docs/usage.md shows"
)

_prompts = WeakValueDictionary[int, FixedIds]()  # by the id of the request


class Processors:
    """A follower that calls a request's callables. If one of them fails, no token is drawn."""

    def __init__(self, calls: Iterable[Callable[..., Any]]) -> None:
        self._calls = [(call, len(inspect.signature(call).parameters) == 3) for call in calls]
        self._output = OutputIds()
        self._prompt: FixedIds | None = None  # made if a callable takes it

    def apply(self, seq: Sequence, drafts: list[int], logits: torch.Tensor) -> torch.Tensor:
        """The logits [V] for the token after the `drafts`, from the model's `logits` in float32.

        The callables may write into `logits`. This does not wait for the device.
        """
        index, output = len(seq.token_ids) + len(drafts), self._output
        output.become(seq, drafts)
        for place, (call, takes_prompt) in enumerate(self._calls):
            given = (self._prompt_of(seq), output) if takes_prompt else (output,)
            try:
                result = call(*given, logits)
                _check(result, logits)
            except Exception as error:
                hint = OTHERS if _is_of_transformers(call) else ""
                seq.parts.errors[index] = f"logits_processors[{place}]: {shown(error)}{hint}"
                return torch.full_like(logits, -torch.inf)
            logits = result
        return logits

    def update(self, seq: Sequence) -> None:
        """Do nothing: the next `apply` reads the tokens."""

    def reset(self) -> None:
        """Start over: the next `apply` reads every token."""
        self._output = OutputIds()

    def _prompt_of(self, seq: Sequence) -> FixedIds:
        """The prompt, in a list that all samples of the request share."""
        if self._prompt is None:
            prompt = _prompts.get(seq.request_id)
            if prompt is None:
                prompt = FixedIds(seq.token_ids[: seq.num_prompt_tokens])
            self._prompt = _prompts.setdefault(seq.request_id, prompt)
        return self._prompt


def _check(result: Any, logits: torch.Tensor) -> None:
    """Raise if the result of a callable is not logits."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it must return a tensor, got {type(result).__name__}")
    for name in ("shape", "dtype", "device"):
        mine, theirs = getattr(logits, name), getattr(result, name)
        if mine != theirs:
            shown = [list(x) if name == "shape" else x for x in (mine, theirs)]
            raise ValueError(f"it must return logits of {name} {shown[0]}, got {shown[1]}")


def _is_of_transformers(call: Callable[..., Any]) -> bool:
    """Whether a callable is one of transformers', or takes the same arguments."""
    names = list(inspect.signature(call).parameters)
    return type(call).__module__.startswith("transformers.") or names == ["input_ids", "scores"]
