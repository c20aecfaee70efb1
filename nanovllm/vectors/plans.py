"""Planner: turns prompts into requests for hidden states, and these into vectors and scores.

It runs nothing: `LLM` and `AsyncLLM` compute the requests of a plan, each in its own way.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.engine.requests.intake import Intake
from nanovllm.engine.requests.request import Request
from nanovllm.models.config import ModelConfig
from nanovllm.pooling_params import PoolingParams, with_pooling_params
from nanovllm.utils.checks import check_bool, check_int, did_you_mean
from nanovllm.vectors.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    common_fields,
)
from nanovllm.vectors.pooling import POOLINGS, VECTOR_POOLINGS, Pooling
from nanovllm.vectors.preparer import (
    Preparer,
    Prompts,
    VectorPlan,
    prompt_params,
    salted,
    vectors_of,
)
from nanovllm.vectors.scores import Scores


class Planner:
    """Plans the calls of one model. Errors name the prompt or the option, and change nothing.

    `name` is how the user calls the model; its files are in `path`.
    """

    def __init__(self, intake: Intake, model_config: ModelConfig, path: Path, name: str) -> None:
        self._preparer = Preparer(intake, model_config, path, name)

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        cache_salt: str | None = None,
        name: str = "prompts",
        **others: Any,
    ) -> VectorPlan[EmbeddingRequestOutput]:
        """Plan a call of `LLM.embed` with these options. `name` is what errors call the prompts."""
        _check_others(self.embed, others)
        size, normalizes, kept = with_pooling_params(
            "embed", pooling_params, dimensions=dimensions, normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip
        preparer = self._preparer
        kind = preparer.pooling(pooling, VECTOR_POOLINGS)
        if size is not None:
            check_int("dimensions", size, 1, preparer.model_config.hidden_size)
        if normalizes is None:
            normalizes = preparer.conventions.normalize
        check_bool("normalize", normalizes)
        prefix = preparer.prefix(prompt_name, instruction)
        accepted = preparer.accept_all(name, prompts, kind, prefix, prompt_params(kept))
        plan = VectorPlan(accepted, lambda requests: _embeddings(requests, size, normalizes))
        return salted(plan, cache_salt)

    def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> VectorPlan[PoolingRequestOutput]:
        """Plan a call of `LLM.encode` with these options."""
        _check_others(self.encode, others)
        if isinstance(pooling, PoolingParams) and pooling_params is None:  # vLLM's order
            pooling, pooling_params = None, pooling
        (kept,) = with_pooling_params(
            "encode", pooling_params, truncate_prompt_tokens=truncate_prompt_tokens
        )
        kind = self._preparer.pooling(pooling, POOLINGS)
        params = prompt_params(kept)
        accepted = self._preparer.accept_all("prompts", prompts, kind, params=params)
        return salted(VectorPlan(accepted, _states), cache_salt)

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        instruction: str | None = None,
        method: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> VectorPlan[ScoringRequestOutput]:
        """Plan a call of `LLM.score` with these options."""
        _check_others(self.score, others)
        (kept,) = with_pooling_params(
            "score", pooling_params, truncate_prompt_tokens=truncate_prompt_tokens
        )
        plan = Scores(self._preparer).plan(queries, documents, instruction, method, kept)
        return salted(plan, cache_salt)


def _check_others(call: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raise for options that a call does not have, unless they are vLLM's and ask for nothing."""
    if not others:
        return
    from nanovllm.from_vllm.names.calls import VECTOR_CALLS

    for name, value in others.items():
        if name not in VECTOR_CALLS:
            known = [*inspect.signature(call).parameters][:-1]
            hint = did_you_mean(name, known)
            raise TypeError(f"{call.__name__}: unknown option {name!r}{hint}")
        VECTOR_CALLS[name].check(name, value)


def _embeddings(
    requests: list[Request], dimensions: int | None, normalizes: bool
) -> list[EmbeddingRequestOutput]:
    vectors = vectors_of(requests, dimensions, normalizes)
    # One list after the other, between which other threads run; NumPy makes them faster.
    return [
        _embedding(request, vector.tolist())
        for request, vector in zip(requests, vectors, strict=True)
    ]


def _embedding(request: Request, vector: list[float]) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        **common_fields(request), embedding=vector, outputs=EmbeddingOutput(embedding=vector)
    )


def _states(requests: list[Request]) -> list[PoolingRequestOutput]:
    return [
        PoolingRequestOutput(
            **common_fields(request),
            outputs=PoolingOutput(data=torch.from_numpy(request.seqs[0].parts.keeper.result)),
        )
        for request in requests
    ]
