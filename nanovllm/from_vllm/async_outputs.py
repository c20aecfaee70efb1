"""The outputs of an `AsyncLLM` in vLLM's form, by the `output_kind` of the parameters."""

import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from nanovllm.from_vllm.outputs import Progress
from nanovllm.output_kind import RequestOutputKind
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.remote.async_engine import AsyncEngine


async def outputs_of(
    llm: "AsyncEngine", prompt: Any, params: SamplingParams | None, **asked: Any
) -> AsyncIterator[RequestOutput]:
    """Complete a prompt, and yield its outputs; `asked` are the keywords of `generate`."""
    given = SamplingParams() if params is None else params
    plain, is_whole = given, False
    if isinstance(given, SamplingParams):  # else the request refuses it
        plain = dataclasses.replace(given, output_kind=None)
        is_whole = given.output_kind is RequestOutputKind.FINAL_ONLY
    async with llm.request(prompt, plain, **asked, is_whole=is_whole) as request:
        if is_whole:
            yield await request.output()
            return
        progress = Progress(request.name, given)
        async for event in request.events():
            progress.add(event)
            # The last one is made when the engine has reported the end, with its times.
            if not progress.has_ended:
                yield _next(llm, progress, request)
        yield _next(llm, progress, request)


def _next(llm: "AsyncEngine", progress: Progress, request: Any) -> RequestOutput:
    """The output after a new event, of which there is one."""
    output = progress.output(request.copy.request, llm.tokenizer)
    assert output is not None
    return output
