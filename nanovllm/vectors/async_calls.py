"""AsyncVectorCalls: the calls of `AsyncLLM` that compute prompts and generate nothing."""

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

from nanovllm.engine.remote.async_engine import AsyncEngine
from nanovllm.engine.remote.readers import all_size
from nanovllm.engine.requests.request import Request
from nanovllm.lora_request import LoRARequest
from nanovllm.pooling_params import PoolingParams
from nanovllm.utils.tasks import all_of
from nanovllm.vectors.kept_states import Pooling
from nanovllm.vectors.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.vectors.plans import Planner
from nanovllm.vectors.preparer import Output, Plan, Prompts, check_complete


class AsyncVectorCalls(AsyncEngine):
    """`embed`, `encode` and `score`."""

    async def embed(
        self, prompts: Prompts, *, lora_request: LoRARequest | None = None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of prompts; options are those of `LLM.embed`, without a progress bar.

        At most `2 * max_num_seqs` prompts of a call are queued at a time. A bad prompt raises
        before any is queued. Leaving the call, or aborting one of its requests, aborts them all.
        """
        plan = functools.partial(self._planner.embed, prompts, **options)
        return await self._carry_out(plan, all_size(prompts), lora_request)

    async def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of prompts, by the options of `LLM.encode`. Otherwise as `embed`."""
        plan = functools.partial(self._planner.encode, prompts, pooling, **options)
        return await self._carry_out(plan, all_size(prompts), lora_request)

    async def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries, by the options of `LLM.score`. Otherwise as `embed`."""
        plan = functools.partial(self._planner.score, queries, documents, **options)
        most = len(documents) if isinstance(documents, list | tuple) else 1
        size = all_size(queries) * most + all_size(documents)  # a query with each document
        return await self._carry_out(plan, size, lora_request)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._intake, self.model_config, self.model_path, str(self._asked.model))

    async def _carry_out(
        self, make: Callable[[], Plan[Output]], size: int, lora_request: LoRARequest | None
    ) -> list[Output]:
        """Make a plan of prompts of this size, compute its requests, and return its outputs.

        Twice as many prompts are queued as may run: while the engine computes some, others wait.
        Room for these is kept for the whole call, so that once begun it is not refused.
        """
        self._check_adapter(lora_request)
        self.check()
        plan = await self._readers.run(make, size)
        most = self.config.max_num_seqs
        places = min(len(plan.accepted), most + min(most, self.max_waiting))
        waiting = iter(enumerate(plan.accepted))
        requests: dict[int, Request] = {}

        async def compute() -> None:
            """Compute one prompt after the other until none waits."""
            for index, accepted in waiting:
                queued = self._queued(
                    accepted, accepted.params, lora_request=lora_request, is_counted=False
                )
                async with queued as call:
                    requests[index] = await call.request()
                check_complete(requests[index])  # if it is not, the others are cancelled

        with self._calls.room(places):
            await all_of(compute() for _ in range(places))
        done = [requests[index] for index in range(len(plan.accepted))]
        return await self._readers.run(functools.partial(plan.outputs, done), size)
