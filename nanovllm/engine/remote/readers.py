"""Readers: threads that tokenize prompts and apply chat templates, while an event loop goes on."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nanovllm.sampling_params import SamplingParams

T = TypeVar("T")
NUM_THREADS = 2
# Characters or token ids of a prompt. A prompt below SMALL is read on the event loop, because a
# change of threads would take longer. Prompts of LARGE or more share one thread, so that they do
# not delay others.
SMALL, LARGE = 1 << 11, 1 << 17
MESSAGE, PROMPT = 64, 8  # added to the text's size for a message, or for a prompt of several


class Readers:
    """Runs functions on the event loop or in threads, depending on the size of their input."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="nanovllm-read")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-read-large")

    async def run(self, read: Callable[[], T], size: int) -> T:
        """Run the function; returns its result."""
        if size < SMALL:
            return read()
        threads = self._threads if size < LARGE else self._large
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    def close(self) -> None:
        """End the threads, when they have read their current prompts."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


def prompt_size(prompt: Any) -> int:
    """The token ids of a prompt, or the characters of its text or of a conversation's messages.

    `MESSAGE` is added for a message or a part of one, and `SMALL` for tool calls, so that a thread
    reads them.
    """
    if isinstance(prompt, Mapping):
        parts = ("prompt", "prompt_token_ids", "content", "text", "reasoning_content")
        calls = SMALL if prompt.get("tool_calls") else 0
        return sum(prompt_size(prompt.get(name)) for name in parts) + calls
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        return _sum_to_large(MESSAGE + prompt_size(part) for part in prompt)
    return len(prompt) if hasattr(prompt, "__len__") else 0


def all_size(prompts: Any) -> int:
    """The size of one or several prompts, with the additional cost of each."""
    texts = prompts if isinstance(prompts, list | tuple) else [prompts]
    return _sum_to_large(PROMPT + prompt_size(text) for text in texts)


def _sum_to_large(sizes: Iterable[int]) -> int:
    """The sum of sizes, or the first part of it that is LARGE: more makes no difference."""
    number = 0
    for size in sizes:
        number += size
        if number >= LARGE:
            break
    return number


def params_size(params: SamplingParams) -> int:
    """The size of the parameters to check."""
    lists: tuple[Any, ...] = (
        params.allowed_token_ids, params.logit_bias, params.stop, params.stop_token_ids,
    )  # fmt: skip
    return sum(len(each or ()) for each in lists)
