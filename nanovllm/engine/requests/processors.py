"""Processors: a request's callables that change its logits before anything else does."""

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from nanovllm.engine.requests.fixed_ids import FixedIds, OutputIds
from nanovllm.engine.run.transfer import download
from nanovllm.engine.schedule.sequence import End, Sequence

OTHERS = (
    "; one of transformers takes (input_ids, scores): wrap it in a function of (prompt_token_ids,"
    " token_ids, logits), as docs/usage.md shows"
)
EMPTY = "left no token to draw: all logits are minus infinity, or some are NaN"

_prompts = WeakValueDictionary[int, FixedIds]()  # by the id of the request


class Processors:
    """A follower that ends a sequence with an "error" if one of its callables has failed.

    Instead of a token from the failed logits, another token is drawn, and removed at the end. This
    token does not stop the request, unless only such tokens are allowed.
    """

    def __init__(self, calls: Iterable[Callable[..., Any]]) -> None:
        self._calls = [(call, len(inspect.signature(call).parameters) == 3) for call in calls]
        # By the index in `token_ids` of the drawn token: the failure; and in flight, whether no
        # token was left to draw.
        self._errors: dict[int, str] = {}
        self._empty: dict[int, torch.Tensor] = {}
        self._output = OutputIds()
        self._prompt: FixedIds | None = None  # made if a callable takes it

    def apply(self, seq: Sequence, drafts: list[int], logits: torch.Tensor) -> torch.Tensor:
        """The logits [V] for the token after the `drafts`, from the model's `logits` in float32.

        The callables may write into `logits`. This does not wait for the device.
        """
        index, output = len(seq.token_ids) + len(drafts), self._output
        output.become(seq, drafts)
        self._errors.pop(index, None)
        for place, (call, takes_prompt) in enumerate(self._calls):
            given = (self._prompt_of(seq), output) if takes_prompt else (output,)
            try:
                result = call(*given, logits)
                _check(result, logits)
            except Exception as error:
                hint = OTHERS if _is_of_transformers(call) else ""
                self._errors[index] = f"logits_processors[{place}]: {_shown(error)}{hint}"
                return _fallback(seq, logits)
            logits = result
        is_empty = logits.isnan().any() | (logits.max() == -torch.inf)
        self._empty[index] = download(is_empty)
        return torch.where(is_empty, _fallback(seq, logits), logits)

    def update(self, seq: Sequence) -> End | None:
        """The end of the sequence, if its last known token was drawn without the callables."""
        index = seq.num_known_tokens - 1
        is_empty = self._empty.pop(index, None)
        if is_empty is not None and bool(is_empty):
            self._errors[index] = f"logits_processors {EMPTY}"
        error = self._errors.get(index)
        return None if error is None else End("error", error)

    def reset(self) -> None:
        """Drop the recorded failures: these tokens are drawn again."""
        self._errors.clear()
        self._empty.clear()
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


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _fallback(seq: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """Logits with which one token is drawn that does not stop the request, if possible."""
    left = torch.full_like(logits, -torch.inf)
    left[next(i for i in itertools.count() if i not in seq.stop_token_ids) % len(logits)] = 0.0
    return left
