"""Vectors: an engine computes prompts and generates nothing."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.exclusive import exclusive
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.generation import check_call, run_until_done
from nanovllm.engine.requests.intake import Accepted
from nanovllm.lora_request import LoRARequest, LoRARequests, check_lora_request, lora_requests
from nanovllm.pooling_params import PoolingParams
from nanovllm.vectors.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.vectors.plans import Planner
from nanovllm.vectors.pooling import Pooling
from nanovllm.vectors.preparer import Output, Prompts, VectorPlan


class Vectors:
    """`embed`, `encode` and `score`, by the options of a `Planner`.

    Their prompts may share steps with requests that generate.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        # Makes requests from prompts, and outputs from finished requests.
        self.planner = Planner(
            engine.intake, engine.model_config, engine.model_path, str(engine.asked.model)
        )

    def embed(
        self, prompts: Prompts, use_tqdm: bool, lora_request: LoRARequests, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt."""
        check_call(self.engine, use_tqdm)
        return self._carry_out(self.planner.embed(prompts, **options), use_tqdm, lora_request)

    def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None,
        use_tqdm: bool,
        lora_request: LoRARequests,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of every prompt."""
        check_call(self.engine, use_tqdm)
        plan = self.planner.encode(prompts, pooling, **options)
        return self._carry_out(plan, use_tqdm, lora_request)

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        use_tqdm: bool,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries."""
        check_call(self.engine, use_tqdm)
        check_lora_request(lora_request)  # one for all
        plan = self.planner.score(queries, documents, **options)
        return self._carry_out(plan, use_tqdm, lora_request)

    def _carry_out(
        self, plan: VectorPlan[Output], use_tqdm: bool, lora_request: LoRARequests
    ) -> list[Output]:
        adapters = lora_requests(lora_request, len(plan.accepted))
        known: dict[LoRARequest, Any] = {}
        pairs = zip(plan.accepted, adapters, strict=True)
        accepted = [self.engine.intake.adapted(*pair, known) for pair in pairs]
        return self._compute(plan, accepted, use_tqdm)

    @exclusive
    def _compute(
        self, plan: VectorPlan[Output], accepted: list[Accepted], use_tqdm: bool
    ) -> list[Output]:
        """Compute the prompts; the outputs of a step are made during the next step."""
        requests = self.engine.requests
        ids = [self.engine.enqueue(one) for one in accepted]
        made: dict[int, Output] = {}

        def make(done: Iterable[int]) -> None:
            ended = {request_id: requests.finished[request_id] for request_id in done}
            made.update(zip(ended, plan.outputs([*ended.values()]), strict=True))

        when_done = make if plan.is_by_one else None
        run_until_done(self.engine, ids, use_tqdm, "Computing prompts", when_done)
        if plan.is_by_one:
            outputs = [made[request_id] for request_id in ids]
        else:
            outputs = plan.outputs([requests.finished[request_id] for request_id in ids])
        for request_id in ids:
            requests.drop_output(request_id)
        return outputs
