"""Planner: from prompts to requests for hidden states, and from these to vectors and scores.

It runs nothing: `LLM` and `AsyncLLM` compute the requests of a plan, each in its way.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.requests.intake import Accepted, Intake
from nanovllm.engine.requests.pool import POOLINGS, Pooling, Wanted
from nanovllm.engine.requests.request import Request
from nanovllm.models.bare import NO_HEAD
from nanovllm.models.config import ModelConfig
from nanovllm.pooling_params import PoolingParams, with_pooling_params
from nanovllm.prompts import Prompt, prompt_list, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_text,
    did_you_mean,
    shorten,
)
from nanovllm.vectors.conventions import Conventions, read_conventions
from nanovllm.vectors.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    common_fields,
)
from nanovllm.vectors.rerank import INSTRUCTION, query_prefix, rerank_prompt, yes_and_no
from nanovllm.vllm_names import VECTOR_CALLS

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
METHODS = ("yes_no", "cosine")
Prompts = Prompt | Iterable[Prompt]
Output = TypeVar("Output")


class Plan(NamedTuple, Generic[Output]):
    """Requests to compute, and what makes outputs of them when they are complete, in order."""

    accepted: list[Accepted]
    make: Callable[[list[Request]], list[Output]]

    def outputs(self, requests: list[Request]) -> list[Output]:
        """The outputs of the requests, which have ended; raises if one is not complete."""
        for request in requests:
            check_complete(request)
        return self.make(requests)


class Prefix(NamedTuple):
    """A text before prompts. It is an error for token ids, if the caller asked for it."""

    text: str
    is_asked: bool

    def before(self, prompt: Any) -> Any:
        """The prompt with the text before it."""
        source = split_prompt(prompt)[0]
        if isinstance(source, str):
            return f"{self.text}{source}"
        if self.is_asked:
            raise TypeError(f"{shorten(self.text)} comes before texts only, got token ids")
        return prompt


class Planner:
    """Plans the calls of one model. Errors name the prompt or the option, and change nothing.

    `name` is how the user calls the model, whose files are in `path`.
    """

    def __init__(self, intake: Intake, model_config: ModelConfig, path: Path, name: str) -> None:
        self._intake, self._model_config = intake, model_config
        self._path, self._name = path, name

    @cached_property
    def conventions(self) -> Conventions:
        """How this model's vectors are made: see `nanovllm.vectors.conventions`."""
        return read_conventions(self._path, self._model_config.hidden_size)

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
        name: str = "prompts",
        **others: Any,
    ) -> Plan[EmbeddingRequestOutput]:
        """Plan `LLM.embed`, whose options these are. `name` is what errors call the prompts."""
        _check_others(self.embed, others)
        dimensions, normalize, truncate_prompt_tokens = with_pooling_params(
            "embed", pooling_params, dimensions=dimensions, normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip
        kind = self._pooling(pooling, POOLINGS[:3])
        if dimensions is not None:
            check_int("dimensions", dimensions, 1, self._model_config.hidden_size)
        if normalize is not None:
            check_bool("normalize", normalize)
        normalizes = self.conventions.normalize if normalize is None else normalize
        prefix = self._prefix(prompt_name, instruction)

        def outputs(requests: list[Request]) -> list[EmbeddingRequestOutput]:
            vectors = _vectors(requests, dimensions, normalizes).tolist()
            return [
                EmbeddingRequestOutput(
                    **common_fields(request),
                    embedding=vector,
                    outputs=EmbeddingOutput(embedding=vector),
                )
                for request, vector in zip(requests, vectors, strict=True)
            ]

        params = _params(truncate_prompt_tokens)
        return Plan(self._accept_all(name, prompts, kind, prefix, params), outputs)

    def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> Plan[PoolingRequestOutput]:
        """Plan `LLM.encode`, whose options these are."""
        _check_others(self.encode, others)
        if isinstance(pooling, PoolingParams) and pooling_params is None:  # vLLM's order
            pooling, pooling_params = None, pooling
        (truncate_prompt_tokens,) = with_pooling_params(
            "encode", pooling_params, truncate_prompt_tokens=truncate_prompt_tokens
        )
        kind = self._pooling(pooling, POOLINGS)

        def outputs(requests: list[Request]) -> list[PoolingRequestOutput]:
            return [
                PoolingRequestOutput(
                    **common_fields(request),
                    outputs=PoolingOutput(data=request.seqs[0].pool.result),
                )
                for request in requests
            ]

        params = _params(truncate_prompt_tokens)
        return Plan(self._accept_all("prompts", prompts, kind, params=params), outputs)

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        instruction: str | None = None,
        method: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> Plan[ScoringRequestOutput]:
        """Plan `LLM.score`, whose options these are."""
        _check_others(self.score, others)
        (truncate_prompt_tokens,) = with_pooling_params(
            "score", pooling_params, truncate_prompt_tokens=truncate_prompt_tokens
        )
        params = _params(truncate_prompt_tokens)
        if method is None:
            method = "yes_no" if self._ranks_documents else "cosine"
        check_choice("method", method, METHODS)
        query_list = prompt_list("queries", queries)
        document_list = prompt_list("documents", documents)
        if len(query_list) == 1:
            query_list *= len(document_list)
        if len(query_list) != len(document_list):
            raise ValueError(
                f"queries must be one or as many as documents ({len(document_list)}), got"
                f" {len(query_list)}"
            )
        if method == "yes_no":
            if truncate_prompt_tokens is not None:
                raise ValueError(
                    "truncate_prompt_tokens must be None with method='yes_no', whose prompts begin"
                    f" with the question, got {truncate_prompt_tokens}; cut the documents"
                )
            return self._score_by_answer(query_list, document_list, instruction)
        return self._score_by_cosine(query_list, document_list, instruction, params)

    @property
    def _ranks_documents(self) -> bool:
        names = (self._name, self._path.name)
        return self.conventions.labels is not None or any("reranker" in n.lower() for n in names)

    def _pooling(self, asked: Any, allowed: Iterable[Pooling]) -> Pooling:
        if asked is None:
            return self.conventions.pooling
        check_choice("pooling", asked, tuple(allowed))
        return asked  # type: ignore[no-any-return]

    def _prefix(self, prompt_name: Any, instruction: Any) -> Prefix:
        """What comes before texts."""
        if instruction is None:
            return Prefix(self.conventions.prefix(prompt_name), prompt_name is not None)
        if prompt_name is not None:
            raise ValueError("prompt_name and instruction exclude each other, got both")
        return Prefix(query_prefix(_text("instruction", instruction)), True)

    def _score_by_answer(
        self, queries: list[Any], documents: list[Any], instruction: Any
    ) -> Plan[ScoringRequestOutput]:
        tokenizer, config = self._intake.tokenizer, self._model_config
        if tokenizer is None:
            raise ValueError("method='yes_no' needs a tokenizer, and the model directory has none")
        task = INSTRUCTION if instruction is None else _text("instruction", instruction)
        if not config.has_head:
            raise ValueError(NO_HEAD)
        labels = self.conventions.labels or yes_and_no(tokenizer)
        for label in labels:
            check_int("the token id of an answer", label, 0, config.vocab_size - 1)
        accepted = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            texts = _text(f"queries[{index}]", query), _text(f"documents[{index}]", document)
            prompt = rerank_prompt(tokenizer, task, *texts)
            accepted.append(self._accept(f"documents[{index}]", prompt, Wanted("last", labels)))

        def outputs(requests: list[Request]) -> list[ScoringRequestOutput]:
            logprobs = (torch.tensor(request.seqs[0].pool.logprobs) for request in requests)
            scores = [each.softmax(0)[0].item() for each in logprobs]
            return [_scored(*each) for each in zip(requests, scores, strict=True)]

        return Plan(accepted, outputs)

    def _score_by_cosine(
        self, queries: list[Any], documents: list[Any], instruction: Any, params: SamplingParams
    ) -> Plan[ScoringRequestOutput]:
        known, kind = self.conventions.prompts, self._pooling(None, ())
        names = [name if name in known else None for name in ("query", "document")]
        prefix = self._prefix(None if instruction is not None else names[0], instruction)
        prefix = prefix._replace(is_asked=instruction is not None)
        shared = bool(queries) and all(query is queries[0] for query in queries)
        queries = queries[:1] if shared else queries
        asked = self._accept_all("queries", queries, kind, prefix, params)
        prefix = self._prefix(names[1], None)._replace(is_asked=False)
        found = self._accept_all("documents", documents, kind, prefix, params)

        def outputs(requests: list[Request]) -> list[ScoringRequestOutput]:
            vectors = _vectors(requests, None, True)
            cosines = (vectors[: len(asked)] * vectors[len(asked) :]).sum(dim=-1)
            scores = cosines.clamp(-1, 1).tolist()  # they may round to more
            scored = []
            for index, score in enumerate(scores):
                output = _scored(requests[len(asked) + index], score)
                query = requests[0 if shared else index].seqs[0]
                output["prompt_token_ids"] = (
                    query.token_ids[: query.num_prompt_tokens] + output["prompt_token_ids"]
                )
                scored.append(output)
            return scored

        return Plan(asked + found, outputs)

    def _accept_all(
        self,
        name: str,
        prompts: Any,
        pooling: Pooling,
        prefix: Prefix | None = None,
        params: SamplingParams = PROMPT_ONLY,
    ) -> list[Accepted]:
        """Check and encode all prompts, before anything is queued."""
        return [
            self._accept(f"{name}[{index}]", prompt, Wanted(pooling), prefix, params)
            for index, prompt in enumerate(prompt_list(name, prompts))
        ]

    def _accept(
        self,
        name: str,
        prompt: Prompt,
        wanted: Wanted,
        prefix: Prefix | None = None,
        params: SamplingParams = PROMPT_ONLY,
    ) -> Accepted:
        """Check and encode a prompt, which an error calls `name`."""
        try:
            prompt = prefix.before(prompt) if prefix else prompt
            return self._intake.accept(prompt, params, wanted)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None


def check_complete(request: Request) -> None:
    """Raise if a request has ended before all that it wanted was computed."""
    seq = request.seqs[0]
    if seq.finish_reason == "error":
        raise ValueError(f"lora_request: {seq.stop_reason}")
    if seq.finish_reason != "stop":
        raise NotReadyError("a request was aborted before its whole prompt was computed")


def _check_others(call: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raise for options that a call does not have, unless they are vLLM's and ask for nothing."""
    for name, value in others.items():
        if name not in VECTOR_CALLS:
            known = [*inspect.signature(call).parameters][:-1]
            hint = did_you_mean(name, known)
            raise TypeError(f"{call.__name__}: unknown option {name!r}{hint}")
        VECTOR_CALLS[name].check(name, value)


def _params(truncate_prompt_tokens: int | None) -> SamplingParams:
    """The parameters of a request without generated tokens."""
    if truncate_prompt_tokens is None:
        return PROMPT_ONLY
    return replace(PROMPT_ONLY, truncate_prompt_tokens=truncate_prompt_tokens)


def _text(name: str, value: Any) -> str:
    source = split_prompt(value)[0] if isinstance(value, Mapping) else value
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a text, got {shorten(value)}")
    check_text(name, source)
    return source


def _vectors(requests: list[Request], dimensions: int | None, normalizes: bool) -> torch.Tensor:
    """The requests' pooled states, cut and then normalized: [requests, dimensions]."""
    if not requests:
        return torch.empty(0, 0)
    vectors = torch.stack([request.seqs[0].pool.result for request in requests])[:, :dimensions]
    return F.normalize(vectors, dim=-1) if normalizes else vectors


def _scored(request: Request, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        **common_fields(request), score=score, outputs=ScoringOutput(score=score)
    )
