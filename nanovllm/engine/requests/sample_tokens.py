"""SampleTokens: the tokens of one of several samples, which share the tokens of a long prompt."""

from collections.abc import Iterable, MutableSequence
from typing import Any, cast

# From this many tokens on, samples share a prompt. A list is faster, and a copy of a shorter prompt
# takes at most 32 KB.
LONG = 4096
MANY = 1_000_000  # tokens of all samples' prompts, from which on they share them: 8 MB of copies


def shared(prompt: list[int], num_samples: int) -> list[int]:
    """The prompt for the samples of a request: a copy of it copies no long prompt."""
    if len(prompt) < LONG and len(prompt) * num_samples < MANY:
        return prompt
    return cast("list[int]", SampleTokens(prompt, []))


class SampleTokens(MutableSequence[int]):
    """Acts as a list of the prompt's tokens and the output's. Only the output can change."""

    __slots__ = ("_output", "_prompt")

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self._prompt, self._output = prompt, output

    def copy(self) -> "SampleTokens":
        """The tokens of another sample, which has the same prompt."""
        return SampleTokens(self._prompt, self._output.copy())

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __getitem__(self, key: Any) -> Any:
        size = len(self._prompt)
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return self._prompt[index] if index < size else self._output[index - size]
        start, stop, step = key.indices(len(self))
        if step != 1:
            return [*self][key]
        if start >= size:
            return self._output[start - size : max(stop, start) - size]
        return self._prompt[start:stop] + self._output[: max(0, stop - size)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._output[self._place(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._output[self._place(key)]

    def insert(self, index: int, value: int) -> None:
        """Insert a token into the output."""
        start = slice(index, None).indices(len(self))[0]
        self._output.insert(self._in_output(start), value)

    def append(self, value: int) -> None:
        """Add a token to the output."""
        self._output.append(value)

    def extend(self, values: Iterable[int]) -> None:
        """Add tokens to the output."""
        self._output.extend(values)

    def _place(self, key: Any) -> Any:
        """The place in the output."""
        if not isinstance(key, slice):
            return self._in_output(range(len(self))[key])
        start, stop, step = key.indices(len(self))
        assert step == 1, "tokens are replaced in one piece"
        start = self._in_output(start)
        return slice(start, max(start, stop - len(self._prompt)))

    def _in_output(self, index: int) -> int:
        assert index >= len(self._prompt), "a prompt that samples share cannot change"
        return index - len(self._prompt)
