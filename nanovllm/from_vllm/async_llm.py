"""vLLM's `AsyncLLMEngine`: an `AsyncLLM` whose requests have vLLM's outputs."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.from_vllm.async_outputs import outputs_of
from nanovllm.from_vllm.collective_rpc import call_of
from nanovllm.from_vllm.names.python import OF_ASYNC
from nanovllm.from_vllm.outputs import model_config_of
from nanovllm.from_vllm.refusals import MakesEngines, refuse_others
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import did_you_mean


class AsyncLLMEngine(AsyncLLM):
    """An `AsyncLLM` by vLLM's methods: `generate` yields outputs, by default everything so far.

    Other methods are those of `AsyncLLM`.
    """

    @classmethod
    def from_engine_args(cls, engine_args: MakesEngines, **others: Any) -> "AsyncLLMEngine":
        """Load the model of an `EngineArgs`; vLLM's other arguments must be None or left out."""
        engine: AsyncLLMEngine = super().from_engine_args(engine_args, **others)
        return engine

    async def generate(  # type: ignore[override]  # outputs, not events
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; `output_kind` of the parameters says what an output has."""
        refuse_others("generate", others)
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        outputs: Any = outputs_of(self, prompt, sampling_params, **asked)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def get_tokenizer(self) -> Any:
        """The tokenizer, one of transformers."""
        return self.tokenizer

    async def get_model_config(self) -> Any:
        """What scripts read most of vLLM's: names, lengths and sizes."""
        return model_config_of(self)

    async def check_health(self) -> None:
        """Raise if the engine has ended."""
        self.check()

    @property
    def is_running(self) -> bool:
        """Whether the engine answers requests."""
        try:
            self.check()
        except (RuntimeError, OSError):
            return False
        return True

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return not self.is_running

    async def abort(self, request_id: str | Iterable[str], **others: Any) -> None:
        """End requests, whose callers get a last output. Names of others have no effect."""
        refuse_others("abort", others, ("internal",))
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if self.open_requests.find(name) is not None:
                await super().abort(name)

    async def collective_rpc(
        self,
        method: Callable[..., Any] | str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the worker of every rank, as `LLM.collective_rpc`."""
        refuse_others("collective_rpc", {"timeout": timeout})
        return await self.apply_model(call_of(method, args, kwargs))

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """End the engine after its step: `close`, which waits for that step alone."""
        self.close()

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name):
            why = OF_ASYNC.get(name)
            hint = "" if name.startswith("_") else did_you_mean(name, dir(type(self)))
            hint = hint if why is None else f": {why}"
            raise AttributeError(f"AsyncLLMEngine has no attribute {name!r}{hint}")
