"""VectorCalls: the calls of `LLM` that compute prompts and generate nothing."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from nanovllm.engine.adapters.requests import Known
from nanovllm.engine.llm_engine import LLMEngine, exclusive
from nanovllm.engine.progress import run_until_done
from nanovllm.engine.requests.intake import Accepted
from nanovllm.engine.requests.pool import Pooling
from nanovllm.lora_request import LoRARequest, LoRARequests, check_lora_request, lora_requests
from nanovllm.pooling_params import PoolingParams
from nanovllm.utils.checks import check_bool
from nanovllm.vectors.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.vectors.plans import Planner
from nanovllm.vectors.preparer import Output, Plan, Prompts


class VectorCalls(LLMEngine):
    """`embed`, `encode` and `score`. Their prompts run beside requests that generate."""

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt, in the order of the prompts.

        Prompts are those of `generate`. `pooling` and `normalize` are the model's by default, as
        sentence-transformers' files in its directory say; without these the last token's state is
        normalized. `dimensions` keeps the first ones of a vector, which is then normalized.
        Texts get the model's prompt `prompt_name` in front, or an `instruction` for queries in the
        form of Qwen3-Embedding. `truncate_prompt_tokens` is that of `SamplingParams`,
        and adapters are those of `generate`. `pooling_params` has options in vLLM's form.
        """
        self._check(use_tqdm)
        plan = self.planner.embed(
            prompts, dimensions=dimensions, normalize=normalize, pooling=pooling,
            prompt_name=prompt_name, instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip
        return self._carry_out(plan, use_tqdm, lora_request)

    def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of every prompt after the final norm, in float32, as they are.

        `pooling` is "last", "cls" (the first token), "mean" or "all"; by default the model's.
        vLLM's order, with a PoolingParams in its place, works too.
        """
        self._check(use_tqdm)
        plan = self.planner.encode(
            prompts, pooling, truncate_prompt_tokens=truncate_prompt_tokens,
            pooling_params=pooling_params, **others,
        )  # fmt: skip
        return self._carry_out(plan, use_tqdm, lora_request)

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        instruction: str | None = None,
        method: str | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries, in the order of the documents.

        There is one query for all documents, or one for each. With `method` "yes_no", that of
        Qwen3-Reranker, a score is the probability of "yes" against "no"; with "cosine" it is the
        cosine of two embeddings. By default models that rank, by their files or their name, use the
        first. `instruction` says what the queries ask for. `truncate_prompt_tokens`, that of
        `SamplingParams`, is for cosines. An adapter is used for all of them.
        """
        self._check(use_tqdm)
        check_lora_request(lora_request)  # one for all
        plan = self.planner.score(
            queries, documents, instruction=instruction, method=method,
            truncate_prompt_tokens=truncate_prompt_tokens, pooling_params=pooling_params, **others,
        )  # fmt: skip
        return self._carry_out(plan, use_tqdm, lora_request)

    @cached_property
    def planner(self) -> Planner:
        """What makes requests of prompts, and outputs of finished requests."""
        name = str(self._asked.model)
        return Planner(self._intake, self.model_config, self.model_path, name)

    def _check(self, use_tqdm: bool) -> None:
        self.check_open()
        check_bool("use_tqdm", use_tqdm)

    def _carry_out(
        self, plan: Plan[Output], use_tqdm: bool, lora_request: LoRARequests
    ) -> list[Output]:
        adapters = lora_requests(lora_request, len(plan.accepted))
        known: Known = {}
        pairs = zip(plan.accepted, adapters, strict=True)
        accepted = [self.adapted(*pair, known) for pair in pairs]
        return self._compute(plan, accepted, use_tqdm)

    @exclusive
    def _compute(
        self, plan: Plan[Output], accepted: list[Accepted], use_tqdm: bool
    ) -> list[Output]:
        """Compute the prompts and make the outputs: of a step's prompts during the next step."""
        ids = [self.enqueue(one) for one in accepted]
        made: dict[int, Output] = {}

        def make(done: Iterable[int]) -> None:
            requests = {request_id: self.finished[request_id] for request_id in done}
            made.update(zip(requests, plan.outputs([*requests.values()]), strict=True))

        run_until_done(self, ids, use_tqdm, "Computing prompts", make if plan.is_by_one else None)
        if plan.is_by_one:
            outputs = [made[request_id] for request_id in ids]
        else:
            outputs = plan.outputs([self.finished[request_id] for request_id in ids])
        for request_id in ids:
            self.drop_output(request_id)
        return outputs
