"""Generation: queue one call's requests, step until they end, and return or stream outputs.

These are functions of the engine, so that a stream keeps its engine alive: the caller may have no
other reference to it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.intake import Accepted, check_whole
from nanovllm.engine.requests.stream import Stream
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import prompt_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, shorten

if TYPE_CHECKING:
    from nanovllm.lora_request import LoRARequests
    from nanovllm.utils.interrupts import Bar

Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each


def accept_prompts(
    engine: LLMEngine, prompts: Any, sampling_params: Params, lora_request: "LoRARequests"
) -> list[Accepted]:
    """Check and encode all prompts, before any is queued."""
    items = prompt_list("prompts", prompts)
    params = params_list(sampling_params, len(items))
    return engine.intake.accept_all([*zip(items, params, strict=True)], lora_request)


def params_list(params: Any, num_prompts: int) -> list[Any]:
    """One SamplingParams for each prompt; given are None, one for all, or a list of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params.clone() if params else SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(
            f"sampling_params must be a SamplingParams or a list of them, got {shorten(params)}"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params must be one or as many as prompts ({num_prompts}), got {len(params)}"
        )
    return [one.clone() if isinstance(one, SamplingParams) else one for one in params]


def complete(engine: LLMEngine, accepted: list[Accepted], use_tqdm: bool) -> list[RequestOutput]:
    """Queue requests and step until all have finished; return their outputs in order."""
    return engine.alone(_complete, engine, accepted, use_tqdm)


def _complete(engine: LLMEngine, accepted: list[Accepted], use_tqdm: bool) -> list[RequestOutput]:
    ids = [engine.enqueue(one) for one in accepted]
    run_until_done(engine, ids, use_tqdm, "Generating")
    return engine.requests.claim(ids, engine.tokenizer)


def stream(engine: LLMEngine, accepted: list[Accepted]) -> Generator[StreamEvent, None, None]:
    """Yield the events of requests, which are queued when the first event is asked for.

    Parameters that no stream can honour raise now. Closing the generator aborts requests that have
    not finished.
    """
    for one in accepted:
        check_whole(one.params)
    return _events(engine, accepted)


def _events(engine: LLMEngine, accepted: list[Accepted]) -> Generator[StreamEvent, None, None]:
    engine.check_open()
    ids = engine.alone(_enqueue_all, engine, accepted)
    try:
        events = Stream(ids, [one.params.n for one in accepted], engine.tokenizer)
        while events.open:
            engine.check_open()
            yield from engine.alone(_step, engine, events)
    finally:
        engine.discard_requests(ids)


def _enqueue_all(engine: LLMEngine, accepted: list[Accepted]) -> list[int]:
    return [engine.enqueue(one, streams=True) for one in accepted]


def _step(engine: LLMEngine, stream: Stream) -> list[StreamEvent]:
    """Run a step, unless another call's step has ended a request; return the events."""
    requests = engine.requests
    if stream.open.keys() <= requests.unfinished.keys():
        engine.advance()
    events: list[StreamEvent] = []
    for request_id in list(stream.open):
        request = requests.unfinished.get(request_id) or requests.finished.get(request_id)
        events += stream.events(request_id, request)
        if request_id not in requests.unfinished:
            del stream.open[request_id]
            requests.drop_output(request_id)
    return events


def run_until_done(
    engine: LLMEngine,
    ids: list[int],
    use_tqdm: bool,
    description: str,
    when_done: Callable[[set[int]], None] | None = None,
) -> None:
    """Step until all of `ids` are finished; other requests' outputs are kept for `step()`.

    `when_done` is called with the ids that a step finished, while the device computes the next.
    """
    pending = set(ids)
    with _bar(engine, len(ids), description) if use_tqdm and ids else nullcontext() as bar:
        while pending:
            engine.advance()
            done = pending & engine.requests.finished.keys()
            pending -= done
            if done and when_done is not None:
                when_done(done)
            if bar is not None:
                bar.n = len(ids) - len(pending)


def _bar(engine: LLMEngine, total: int, description: str) -> "AbstractContextManager[Bar]":
    from nanovllm.engine.requests.progress import progress_bar

    return progress_bar(engine, total, description)


def check_call(engine: LLMEngine, use_tqdm: bool) -> None:
    """Raise if the engine computes no requests now, or `use_tqdm` is no bool."""
    engine.check_open()
    check_bool("use_tqdm", use_tqdm)
