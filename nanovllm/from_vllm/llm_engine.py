"""vLLM's `LLMEngine`: requests with names of the caller's, and outputs at every step."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from nanovllm.engine.requests.given_priority import with_priority
from nanovllm.engine.requests.stream import Stream
from nanovllm.from_vllm.outputs import Progress, model_config_of
from nanovllm.from_vllm.refusals import MakesEngines, made_by, refuse_others
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import shorten


class OpenRequests:
    """The requests of one `LLM` that were added by name, until they have ended."""

    def __init__(self, tokenizer: Any) -> None:
        self.stream = Stream([], [], tokenizer)
        self.progress: dict[int, Progress] = {}  # by the engine's number of the request

    def add(self, number: int, name: str, params: SamplingParams) -> None:
        """Follow a request that is queued."""
        self.stream.open[number] = number
        self.stream.reported[number] = [(0, 0)] * params.n
        self.progress[number] = Progress(name, params)

    def drop(self, number: int) -> None:
        """Forget a request, and what its events have reported."""
        del self.stream.open[number], self.stream.reported[number], self.progress[number]

    def number_of(self, name: str) -> int | None:
        """The engine's number of the request with this name."""
        return next((n for n, progress in self.progress.items() if progress.name == name), None)


class LLMEngine:
    """An `LLM` by vLLM's methods for single steps; `llm.llm_engine` is one, too.

    Other attributes are those of the `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        if "_open_requests" not in vars(llm):
            vars(llm)["_open_requests"] = OpenRequests(llm.tokenizer)
        self._open: OpenRequests = vars(llm)["_open_requests"]

    @classmethod
    def from_engine_args(cls, engine_args: MakesEngines, **others: Any) -> "LLMEngine":
        """Load the model of an `EngineArgs`; vLLM's other arguments must be None or left out."""
        refuse_others("from_engine_args", others, ("usage_context",))
        return cls(made_by(engine_args, "make_llm"))

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        priority: int | None = None,
        **others: Any,
    ) -> str:
        """Queue a request by a name of the caller's; a bad prompt raises and changes nothing."""
        refuse_others("add_request", others | {"arrival_time": arrival_time})
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a text, got {shorten(request_id)}")
        if self._open.number_of(request_id) is not None:
            raise ValueError(f"request_id {shorten(request_id)} is that of another request")
        self.llm.check_open()
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams):
            params = with_priority(params, priority)
        accepted = self.llm.intake.accept(prompt, params, lora_request=lora_request)
        self._open.add(self.llm.enqueue(accepted, streams=True), request_id, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output of each request that has something new.

        `output_kind` of its parameters says what an output has: by default everything so far.
        """
        self.llm.check_open()
        outputs: list[RequestOutput] = self.llm.alone(self._step)
        return outputs

    def _step(self) -> list[RequestOutput]:
        requests, stream = self.llm.requests, self._open.stream
        if stream.open and stream.open.keys() <= requests.unfinished.keys():
            self.llm.advance()
        outputs = []
        for number in list(stream.open):
            has_ended = number not in requests.unfinished
            request = (requests.finished if has_ended else requests.unfinished).get(number)
            if request is None:  # another call has aborted it
                self._open.drop(number)
                continue
            progress = self._open.progress[number]
            for event in stream.events(number, request):
                progress.add(event)
            outputs.append(progress.output(request, self.llm.tokenizer))
            if has_ended:
                self._open.drop(number)
                requests.drop_output(number)
        return [output for output in outputs if output is not None]

    def abort_request(self, request_ids: str | Iterable[str], **others: Any) -> None:
        """End requests, which get no more outputs. Names of others have no effect, as in vLLM."""
        refuse_others("abort_request", others, ("internal",))
        self.llm.check_alive()
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            number = self._open.number_of(name)
            if number is not None:
                self._open.drop(number)
                self.llm.discard_requests([number])

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do for requests that were added by name."""
        return bool(self._open.progress)

    def get_num_unfinished_requests(self) -> int:
        """How many requests that were added by name have not ended."""
        return len(self._open.progress)

    @property
    def model_config(self) -> SimpleNamespace:
        """What scripts read most of vLLM's: names, lengths and sizes."""
        return model_config_of(self.llm)

    def get_model_config(self) -> SimpleNamespace:
        """The `model_config`."""
        return self.model_config

    def __getattr__(self, name: str) -> Any:
        if name == "llm":  # it is not made yet
            raise AttributeError(name)
        return getattr(self.llm, name)
