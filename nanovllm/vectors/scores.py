"""Scores: plans of how well documents fit queries, by an answer's probability or by cosines."""

from typing import Any

import torch

from nanovllm.engine.requests.request import Request
from nanovllm.models.config import NO_HEAD
from nanovllm.prompts import prompt_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice, check_int
from nanovllm.vectors.outputs import ScoringOutput, ScoringRequestOutput, common_fields
from nanovllm.vectors.pooling import PoolingTask
from nanovllm.vectors.preparer import (
    Preparer,
    Prompts,
    VectorPlan,
    named,
    prompt_params,
    text_of,
    vectors_of,
)
from nanovllm.vectors.rerank import INSTRUCTION, rerank_prompt, yes_and_no

METHODS = ("yes_no", "cosine")
ScorePlan = VectorPlan[ScoringRequestOutput]


class Scores:
    """Plans scores of one model; `preparer` makes its prompts."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def plan(
        self,
        queries: Prompts,
        documents: Prompts,
        instruction: Any,
        method: str | None,
        truncate_prompt_tokens: int | None,
    ) -> ScorePlan:
        """Plan a call of `LLM.score` with these options."""
        params = prompt_params(truncate_prompt_tokens)
        if method is None:
            method = "yes_no" if self._ranks_documents else "cosine"
        check_choice("method", method, METHODS)
        query_list, document_list = _pairs(queries, documents)
        if method == "cosine":
            return self._by_cosine(query_list, document_list, instruction, params)
        if truncate_prompt_tokens is not None:
            raise ValueError(
                "truncate_prompt_tokens must be None with method='yes_no', whose prompts begin with"
                f" the question, got {truncate_prompt_tokens}; cut the documents"
            )
        return self._by_answer(query_list, document_list, instruction)

    @property
    def _ranks_documents(self) -> bool:
        """Whether the model was made to rank, by its files or its name."""
        names = (self._preparer.name, self._preparer.path.name)
        is_named = any("reranker" in name.lower() for name in names)
        return is_named or self._preparer.conventions.labels is not None

    def _by_answer(self, queries: list[Any], documents: list[Any], instruction: Any) -> ScorePlan:
        preparer, task = self._preparer, INSTRUCTION
        tokenizer, config = preparer.intake.tokenizer, preparer.model_config
        if tokenizer is None:
            raise ValueError("method='yes_no' needs a tokenizer, and the model directory has none")
        if instruction is not None:
            task = text_of("instruction", instruction)
        if not config.has_head:
            raise ValueError(NO_HEAD)
        labels = preparer.conventions.labels or yes_and_no(tokenizer)
        for label in labels:
            check_int("the token id of an answer", label, 0, config.vocab_size - 1)
        accepted = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            name = f"documents[{index}]"
            texts = text_of(f"queries[{index}]", query), text_of(name, document)
            with named(name):
                prompt = rerank_prompt(tokenizer, preparer.intake.max_model_len, task, *texts)
            accepted.append(preparer.accept(name, prompt, PoolingTask("last", labels)))
        return VectorPlan(accepted, _answers)

    def _by_cosine(
        self,
        queries: list[Any],
        documents: list[Any],
        instruction: Any,
        params: SamplingParams,
    ) -> ScorePlan:
        preparer = self._preparer
        known, pooling = preparer.conventions.prompts, preparer.conventions.pooling
        query_name, document_name = (n if n in known else None for n in ("query", "document"))
        shared = bool(queries) and all(query is queries[0] for query in queries)
        if instruction is None:
            prefix = preparer.prefix(query_name, None)._replace(is_asked=False)
        else:
            prefix = preparer.prefix(None, instruction)
        queries = queries[:1] if shared else queries
        asked = preparer.accept_all("queries", queries, pooling, prefix, params)
        prefix = preparer.prefix(document_name, None)._replace(is_asked=False)
        found = preparer.accept_all("documents", documents, pooling, prefix, params)
        return VectorPlan(
            asked + found, lambda requests: _cosines(requests, len(asked)), is_by_one=False
        )


def _pairs(queries: Prompts, documents: Prompts) -> tuple[list[Any], list[Any]]:
    """A query for each document."""
    query_list = prompt_list("queries", queries)
    document_list = prompt_list("documents", documents)
    if len(query_list) == 1:
        query_list *= len(document_list)
    if len(query_list) != len(document_list):
        raise ValueError(
            f"queries must be one or as many as documents ({len(document_list)}), got"
            f" {len(query_list)}"
        )
    return query_list, document_list


def _answers(requests: list[Request]) -> list[ScoringRequestOutput]:
    """The probabilities of the first label against the second."""
    logprobs = (torch.tensor(request.seqs[0].parts.keeper.logprobs) for request in requests)
    scores = [each.softmax(0)[0].item() for each in logprobs]
    return [_scored(*each) for each in zip(requests, scores, strict=True)]


def _cosines(requests: list[Request], num_queries: int) -> list[ScoringRequestOutput]:
    """The cosines of the first requests, or the first one, with the others."""
    vectors = vectors_of(requests, None, True)
    queries, documents = requests[:num_queries], requests[num_queries:]
    cosines = (vectors[:num_queries] * vectors[num_queries:]).sum(axis=-1)
    if num_queries == 1:
        queries = queries * len(documents)
    scored = []
    for query, document, score in zip(
        queries, documents, cosines.clip(-1, 1).tolist(), strict=True  # they may round to more
    ):  # fmt: skip
        output, seq = _scored(document, score), query.seqs[0]
        output["prompt_token_ids"] = (
            seq.token_ids[: seq.num_prompt_tokens] + output["prompt_token_ids"]
        )
        output["num_prompt_tokens"] += seq.num_prompt_tokens
        scored.append(output)
    return scored


def _scored(request: Request, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        **common_fields(request), score=score, outputs=ScoringOutput(score=score)
    )
