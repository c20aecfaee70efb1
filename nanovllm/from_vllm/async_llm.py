"""vLLM's `AsyncLLMEngine`: an `AsyncLLM` whose requests have vLLM's outputs."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nanovllm import AsyncLLM
from nanovllm.from_vllm.async_outputs import outputs_of
from nanovllm.from_vllm.engine_args import EngineArgs, checked_args
from nanovllm.from_vllm.llm_engine import refuse_others
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams


class AsyncLLMEngine(AsyncLLM):
    """An `AsyncLLM` by vLLM's methods: `generate` yields outputs, by default everything so far.

    Other methods are those of `AsyncLLM`.
    """

    async def generate(  # type: ignore[override]  # outputs, not events
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; `output_kind` of the parameters says what an output has."""
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        outputs: Any = outputs_of(self, prompt, sampling_params, **asked)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def get_tokenizer(self) -> Any:
        """The tokenizer, one of transformers."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raise if the engine has ended."""
        self.check()

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """End the engine after its step: `close`, which waits for that step alone."""
        self.close()


def made_of(engine_args: EngineArgs, others: dict[str, Any]) -> AsyncLLMEngine:
    """Load a model; the other arguments of vLLM's must be None or left out."""
    refuse_others("from_engine_args", others, ("usage_context", "start_engine_loop"))
    return AsyncLLMEngine(**checked_args(engine_args).options)
