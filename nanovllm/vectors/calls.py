"""VectorCalls: the calls of `LLM` that compute prompts and generate nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.engine.llm_engine import LLMEngine, exclusive
from nanovllm.engine.progress import run_until_done
from nanovllm.engine.requests.intake import Accepted
from nanovllm.engine.requests.pool import POOLINGS, Pool, Pooling
from nanovllm.engine.requests.request import Request
from nanovllm.lora_request import (
    LoRARequest,
    LoRARequests,
    check_lora_request,
    lora_requests,
)
from nanovllm.models.bare import NO_HEAD
from nanovllm.prompts import Prompt, prompt_list, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_choice, check_int, check_text, shorten
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

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
METHODS = ("yes_no", "cosine")
Prompts = Prompt | Iterable[Prompt]


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
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt, in the order of the prompts.

        Prompts are those of `generate`. `pooling` and `normalize` are the model's by default, as
        sentence-transformers' files in its directory say; without these the last token's state is
        normalized. `dimensions` keeps the first ones of a vector, which is then normalized.
        Texts get the model's prompt `prompt_name` in front, or an `instruction` for queries in the
        form of Qwen3-Embedding. Adapters are those of `generate`.
        """
        self._check(use_tqdm)
        conventions = self.conventions
        kind = self._pooling(pooling, POOLINGS[:3])
        if dimensions is not None:
            check_int("dimensions", dimensions, 1, self.model_config.hidden_size)
        if normalize is not None:
            check_bool("normalize", normalize)
        normalizes = conventions.normalize if normalize is None else normalize
        prefix = self._prefix(prompt_name, instruction)
        accepted = self._accept_all("prompts", prompts, kind, prefix, lora_request)
        requests = self._pool(accepted, use_tqdm)
        vectors = _vectors(requests, dimensions, normalizes).tolist()
        return [
            EmbeddingRequestOutput(
                **common_fields(request),
                embedding=vector,
                outputs=EmbeddingOutput(embedding=vector),
            )
            for request, vector in zip(requests, vectors, strict=True)
        ]

    def encode(
        self,
        prompts: Prompts,
        pooling: Pooling | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of every prompt after the final norm, in float32, as they are.

        `pooling` is "last", "cls" (the first token), "mean" or "all"; by default the model's.
        """
        self._check(use_tqdm)
        kind = self._pooling(pooling, POOLINGS)
        accepted = self._accept_all("prompts", prompts, kind, None, lora_request)
        requests = self._pool(accepted, use_tqdm)
        return [
            PoolingRequestOutput(
                **common_fields(request), outputs=PoolingOutput(data=request.seqs[0].pool.result)
            )
            for request in requests
        ]

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        instruction: str | None = None,
        method: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries, in the order of the documents.

        There is one query for all documents, or one for each. With `method` "yes_no", that of
        Qwen3-Reranker, a score is the probability of "yes" against "no"; with "cosine" it is the
        cosine of two embeddings. By default models that rank, by their files or their name, use the
        first. `instruction` says what the queries ask for. An adapter is used for all of them.
        """
        self._check(use_tqdm)
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
        by_method = self._score_by_answer if method == "yes_no" else self._score_by_cosine
        adapter = check_lora_request(lora_request)
        return by_method(query_list, document_list, instruction, use_tqdm, adapter)

    @cached_property
    def conventions(self) -> Conventions:
        """How this model's vectors are made: see `nanovllm.vectors.conventions`."""
        return read_conventions(self.model_path, self.model_config.hidden_size)

    @property
    def _ranks_documents(self) -> bool:
        names = (str(self._asked.model), self.model_path.name)
        return self.conventions.labels is not None or any("reranker" in n.lower() for n in names)

    def _check(self, use_tqdm: bool) -> None:
        self.check_open()
        check_bool("use_tqdm", use_tqdm)

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
        self,
        queries: list[Any],
        documents: list[Any],
        instruction: Any,
        use_tqdm: bool,
        adapter: LoRARequest | None,
    ) -> list[ScoringRequestOutput]:
        if self.tokenizer is None:
            raise ValueError("method='yes_no' needs a tokenizer, and the model directory has none")
        task = INSTRUCTION if instruction is None else _text("instruction", instruction)
        if not self.model_config.has_head:
            raise ValueError(NO_HEAD)
        labels = self.conventions.labels or yes_and_no(self.tokenizer)
        for label in labels:
            check_int("the token id of an answer", label, 0, self.model_config.vocab_size - 1)
        accepted = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            texts = _text(f"queries[{index}]", query), _text(f"documents[{index}]", document)
            prompt = rerank_prompt(self.tokenizer, task, *texts)
            name = f"documents[{index}]"
            accepted.append(self._accept(name, prompt, "last", labels, adapter=adapter))
        outputs = []
        for request in self._pool(accepted, use_tqdm):
            score = torch.tensor(request.seqs[0].pool.logprobs).softmax(0)[0].item()
            outputs.append(_scored(request, score))
        return outputs

    def _score_by_cosine(
        self,
        queries: list[Any],
        documents: list[Any],
        instruction: Any,
        use_tqdm: bool,
        adapter: LoRARequest | None,
    ) -> list[ScoringRequestOutput]:
        known, kind = self.conventions.prompts, self._pooling(None, ())
        names = [name if name in known else None for name in ("query", "document")]
        prefix = self._prefix(None if instruction is not None else names[0], instruction)
        prefix = prefix._replace(is_asked=instruction is not None)
        shared = bool(queries) and all(query is queries[0] for query in queries)
        asked = self._accept_all(
            "queries", queries[:1] if shared else queries, kind, prefix, adapter
        )
        prefix = self._prefix(names[1], None)._replace(is_asked=False)
        found = self._accept_all("documents", documents, kind, prefix, adapter)
        requests = self._pool(asked + found, use_tqdm)
        vectors = _vectors(requests, None, True)
        scores = (vectors[: len(asked)] * vectors[len(asked) :]).sum(dim=-1).tolist()
        outputs = []
        for index, score in enumerate(scores):
            output = _scored(requests[len(asked) + index], score)
            query = requests[0 if shared else index].seqs[0]
            output["prompt_token_ids"] = (
                query.token_ids[: query.num_prompt_tokens] + output["prompt_token_ids"]
            )
            outputs.append(output)
        return outputs

    def _accept_all(
        self, name: str, prompts: Any, pooling: Pooling, prefix: Prefix | None, adapter: Any
    ) -> list[Accepted]:
        """Check and encode all prompts, before anything is queued."""
        items = prompt_list(name, prompts)
        adapters = lora_requests(adapter, len(items))
        return [
            self._accept(f"{name}[{index}]", prompt, pooling, prefix=prefix, adapter=one)
            for index, (prompt, one) in enumerate(zip(items, adapters, strict=True))
        ]

    def _accept(
        self,
        name: str,
        prompt: Prompt,
        pooling: Pooling,
        labels: tuple[int, ...] = (),
        prefix: Prefix | None = None,
        adapter: LoRARequest | None = None,
    ) -> Accepted:
        """Check and encode a prompt, which an error calls `name`."""
        try:
            prompt = prefix.before(prompt) if prefix else prompt
            accepted = self._intake.accept(prompt, PROMPT_ONLY, head=bool(labels))
            accepted = self.adapted(accepted, adapter)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        return replace(accepted, pool=Pool(pooling, len(accepted.token_ids), labels))

    @exclusive
    def _pool(self, accepted: list[Accepted], use_tqdm: bool) -> list[Request]:
        """Compute the prompts; the pools of the requests have what was wanted."""
        ids = [self.enqueue(one) for one in accepted]
        run_until_done(self, ids, use_tqdm, "Computing prompts")
        requests = [self.finished[request_id] for request_id in ids]
        for request_id in ids:
            self.drop_output(request_id)
        return requests


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
