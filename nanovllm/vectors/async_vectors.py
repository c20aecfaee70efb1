"""AsyncVectors: an engine in another process computes prompts and generates nothing."""

import functools
from collections.abc import Callable
from typing import Any

from nanovllm.engine.remote.async_engine import AsyncEngine
from nanovllm.engine.remote.readers import all_size
from nanovllm.engine.requests.request import Request
from nanovllm.lora_request import LoRARequest
from nanovllm.pooling_params import PoolingParams
from nanovllm.utils.tasks import all_of
from nanovllm.vectors.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.vectors.plans import Planner
from nanovllm.vectors.pooling import KeptStates, Pooling
from nanovllm.vectors.preparer import Output, Prompts, VectorPlan, check_complete


class AsyncVectors:
    """`embed`, `encode` and `score`, by the options of a `Planner`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.planner = Planner(
            engine.intake, engine.model_config, engine.model_path, str(engine.asked.model)
        )

    async def embed(
        self, prompts: Prompts, lora_request: LoRARequest | None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt."""
        plan = functools.partial(self.planner.embed, prompts, **options)
        return await self._carry_out(plan, all_size(prompts), lora_request)

    async def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None,
        lora_request: LoRARequest | None,
        *,
        max_numbers: int | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of every prompt. More than `max_numbers` in all are an error."""

        def plan() -> VectorPlan[PoolingRequestOutput]:
            made = self.planner.encode(prompts, pooling, **options)
            if max_numbers is not None:
                _check_number(made, self.engine.model_config.hidden_size, max_numbers)
            return made

        return await self._carry_out(plan, all_size(prompts), lora_request)

    async def score(
        self,
        queries: Prompts,
        documents: Prompts,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries."""
        plan = functools.partial(self.planner.score, queries, documents, **options)
        most = len(documents) if isinstance(documents, list | tuple) else 1
        size = all_size(queries) * most + all_size(documents)  # a query with each document
        return await self._carry_out(plan, size, lora_request)

    async def _carry_out(
        self, make: Callable[[], VectorPlan[Output]], size: int, lora_request: LoRARequest | None
    ) -> list[Output]:
        """Make a plan of prompts of this size, compute its requests, and return its outputs.

        At most twice as many prompts are queued as may run: while the engine computes some, others
        wait. Room for these is kept until the call ends, so that it is not refused in the middle.
        """
        engine = self.engine
        engine.check_lora(lora_request)
        engine.check()
        plan = await engine.readers.run(make, size)
        most = engine.config.max_num_seqs
        places = min(len(plan.accepted), most + min(most, engine.max_waiting))
        waiting = iter(enumerate(plan.accepted))
        requests: dict[int, Request] = {}

        async def compute() -> None:
            """Compute one prompt after the other until none waits."""
            for index, accepted in waiting:
                queued = engine.queued(
                    accepted, accepted.params, lora_request=lora_request, is_counted=False
                )
                async with queued as request:
                    requests[index] = await request.finished()
                check_complete(requests[index])  # if it is not, the others are cancelled

        with engine.open_requests.room(places):
            await all_of(compute() for _ in range(places))
        done = [requests[index] for index in range(len(plan.accepted))]
        return await engine.readers.run(functools.partial(plan.outputs, done), size)


def _check_number(plan: VectorPlan[Any], hidden_size: int, most: int) -> None:
    """Raise if the states that a plan keeps have too many numbers."""
    kept = [one.keeper.num_kept for one in plan.accepted if isinstance(one.keeper, KeptStates)]
    if sum(kept) * hidden_size > most:
        raise ValueError(
            f"the states of all inputs must have at most {most} numbers (max_state_numbers), got"
            f" {sum(kept)} tokens times {hidden_size}"
        )
