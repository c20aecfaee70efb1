"""OpenRequest: a request that a caller of an AsyncLLM waits for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.engine.remote.request_copy import RequestCopy
from nanovllm.engine.requests.request import Request
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.utils.slices import Pace, in_slices, next_turn


class OpenRequest:
    """A request that a caller waits for, by `events` or, if it `is_whole`, by `output`."""

    def __init__(
        self, number: int, name: Any, copy: RequestCopy, is_whole: bool, num_open: int
    ) -> None:
        self.number, self.name, self.copy = number, name, copy
        self._is_whole = is_whole
        self._changed = asyncio.Event()
        self.error: BaseException | None = None
        self.is_over = False  # the engine has nothing more to report
        self.num_open = num_open  # unfinished samples

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield the new part whenever the caller asks for the next event, until the end.

        If very much is new, other tasks run in between.
        """
        is_over, pace = False, Pace()
        while not is_over:
            await self._wait()
            is_over = self.is_over
            for event in self.copy.events():
                if self.error is not None:
                    break
                event["request_id"] = self.name
                yield event
                if pace.is_due(1 + sum(map(len, event["logprobs"] or ()))):
                    await next_turn()

    async def output(self, is_lazy: bool = False) -> RequestOutput:
        """The whole output; if it `is_lazy`, log-probabilities are made when iterated over."""
        await self._wait()
        output = await in_slices(self.copy.output(is_lazy))
        output["request_id"] = self.name
        return output

    async def finished(self) -> Request:
        """The request, when it has finished."""
        await self._wait()
        return self.copy.request

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt."""
        return self.copy.request.seqs[0].num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return self.copy.request.seqs[0].token_ids[: self.num_prompt_tokens]

    @property
    def first_token_id(self) -> int:
        """The first token of the prompt."""
        return self.copy.request.seqs[0].token_ids[0]

    @property
    def num_cached_tokens(self) -> int:
        """How many of the prompt's tokens were in the prefix cache; known at the end."""
        return self.copy.request.seqs[0].num_hit_tokens or 0

    def wake(self) -> None:
        """Wake a caller that waits for events."""
        if not self._is_whole:
            self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """Record the end, and wake the caller, which gets the error if there is one."""
        if not self.is_over:
            self.is_over, self.error = True, error
            self._changed.set()

    async def _wait(self) -> None:
        """Wait for progress or the end; raise the error that has ended the request, if any."""
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error.with_traceback(None)  # many calls may raise the same one
