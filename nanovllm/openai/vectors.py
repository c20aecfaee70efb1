"""The bodies of /v1/embeddings, and of vLLM's /score and /rerank: requests and responses.

An unknown field is an error. The calls that get the values check them. It knows no engine.
"""

import base64
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.from_vllm.names.fields import EMBEDDING, SCORING
from nanovllm.openai.field_kinds import (
    AS_TEXT,
    ID,
    PROMPTS,
    SALT,
    SWITCH,
    TEXT,
    Kind,
    check_kinds,
    choice,
    described,
    integer,
)
from nanovllm.openai.fields import given_fields
from nanovllm.openai.request import prompts_of
from nanovllm.utils.json_text import shorten_json
from nanovllm.vectors.outputs import EmbeddingRequestOutput, ScoringRequestOutput

EMBEDDINGS = "/v1/embeddings"
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
FORMATS = ("float", "base64")
EMBED_OPTIONS = (
    "dimensions", "normalize", "pooling", "prompt_name", "instruction", "truncate_prompt_tokens",
    "cache_salt",
)  # fmt: skip
SCORE_OPTIONS = ("instruction", "method", "truncate_prompt_tokens", "cache_salt")
EMBED_FIELDS = ("encoding_format", *EMBED_OPTIONS, "use_activation", "request_id")
SCORE_FIELDS = (*SCORE_OPTIONS, "request_id")
RERANK_FIELDS = ("query", "documents", "top_n", "return_documents")
OTHER_NAMES = {  # vLLM's other names
    "text_1": "queries", "text_2": "documents", "data_1": "queries", "data_2": "documents",
}  # fmt: skip
COMMON: dict[str, Kind] = {
    "model": TEXT, "request_id": ID, "cache_salt": SALT, "instruction": AS_TEXT,
}  # fmt: skip
EMBED_KINDS: dict[str, Kind] = {
    **COMMON, "input": PROMPTS, "encoding_format": choice(*FORMATS), "use_activation": SWITCH,
    "normalize": SWITCH, "dimensions": integer(1), "prompt_name": AS_TEXT, "pooling": AS_TEXT,
}  # fmt: skip
SCORE_KINDS: dict[str, Kind] = {
    **COMMON, **dict.fromkeys((*OTHER_NAMES, *OTHER_NAMES.values()), PROMPTS), "method": AS_TEXT,
}  # fmt: skip
TEXTS_OR_OBJECTS = described(
    {"type": "array", "items": {"type": ["string", "object"]}, "minItems": 1}
)
RERANK_KINDS: dict[str, Kind] = {
    **COMMON, "method": AS_TEXT, "query": TEXT, "documents": TEXTS_OR_OBJECTS,
    "top_n": integer(1), "return_documents": SWITCH,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """A parsed body: the arguments of `embed` or `score`, and the form of the answer.

    `top_n` is the most documents of a ranking; None if the answer is not a ranking. `name` is the
    client's own id of the request.
    """

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    model: str | None
    encoding_format: str = "float"
    top_n: int | None = None
    returns_documents: bool = True
    name: str | None = None


def parse_embeddings(body: Mapping[str, Any]) -> VectorRequest:
    """Parse the body of /v1/embeddings; a field that is null counts as missing."""
    return vector_request(given_fields(body, ("input", *EMBED_FIELDS), EMBEDDING), name="input")


def vector_request(body: dict[str, Any], **defaults: Any) -> VectorRequest:
    """The request of a body with known fields; `defaults` are options that it may not have."""
    check_kinds(body, EMBED_KINDS)
    prompts = _prompts("input", _required(body, "input"))
    kind = body.get("encoding_format", "float")
    if "use_activation" in body:  # vLLM's name
        if "normalize" in body:
            raise ValueError("use_activation is another name of normalize; give one of them")
        body["normalize"] = body["use_activation"]
    options = defaults | {name: body[name] for name in EMBED_OPTIONS if name in body}
    return VectorRequest((prompts,), options, body.get("model"), kind, name=body.get("request_id"))


def parse_score(body: Mapping[str, Any]) -> VectorRequest:
    """Parse the body of /score: `queries` and `documents`, by vLLM's older names `text_1`, ...."""
    body = given_fields(body, (*OTHER_NAMES, "queries", "documents", *SCORE_FIELDS), SCORING)
    check_kinds(body, SCORE_KINDS)
    given, called = dict(body), {}
    for other, name in OTHER_NAMES.items():
        if other in given:
            if name in given:
                raise ValueError(f"{other} is another name of {name}; give one of them")
            given[name], called[name] = given.pop(other), other
    texts = [
        _prompts(called.get(name, name), _required(given, name))
        for name in ("queries", "documents")
    ]
    options, model = _score_options(body), body.get("model")
    return VectorRequest(tuple(texts), options, model, name=body.get("request_id"))


def parse_rerank(body: Mapping[str, Any]) -> VectorRequest:
    """Parse the body of /rerank: a `query`, `documents`, and how many of them to return."""
    body = given_fields(body, (*RERANK_FIELDS, *SCORE_FIELDS), SCORING)
    check_kinds(body, RERANK_KINDS)
    query, documents = _required(body, "query"), _required(body, "documents")
    if not query:
        raise ValueError('query must not be empty, got ""')
    if not isinstance(documents, list) or not documents:
        raise TypeError(
            f"documents must be a list that is not empty, got {shorten_json(documents)}"
        )
    texts = [_text_of(f"documents[{i}]", document) for i, document in enumerate(documents)]
    return VectorRequest(
        (query, texts), _score_options(body), body.get("model"),
        top_n=min(body.get("top_n", len(texts)), len(texts)),
        returns_documents=body.get("return_documents", True), name=body.get("request_id"),
    )  # fmt: skip


def embeddings_body(
    request: VectorRequest, outputs: Sequence[EmbeddingRequestOutput], model: str, data: list[Any]
) -> dict[str, Any]:
    """The body that answers /v1/embeddings; `data` has an `embedding_entry` for each output."""
    return {
        "object": "list",
        "data": data,
        "model": request.model or model,
        "usage": usage(output.num_prompt_tokens for output in outputs),
    }


def embedding_entry(
    request: VectorRequest, index: int, output: EmbeddingRequestOutput
) -> dict[str, Any]:
    """An input's entry in the body that answers /v1/embeddings."""
    vector = output.embedding
    written = _base64(vector) if request.encoding_format == "base64" else vector
    return {"object": "embedding", "index": index, "embedding": written}


def score_body(
    name: str, request: VectorRequest, outputs: Sequence[ScoringRequestOutput], model: str
) -> dict[str, Any]:
    """The body that answers /score or /rerank; `name` becomes a part of its `id`."""
    head: dict[str, Any] = {"model": request.model or model}
    name = request.name or name
    counted = usage(len(output.prompt_token_ids) for output in outputs)
    if request.top_n is None:
        data = [
            {"index": index, "object": "score", "score": output.score}
            for index, output in enumerate(outputs)
        ]
        head |= {"id": f"score-{name}", "object": "list", "created": int(time.time())}
        return {**head, "data": data, "usage": counted}
    order = sorted(range(len(outputs)), key=lambda index: -outputs[index].score)[: request.top_n]
    shows = request.returns_documents
    results = [
        {
            "index": index,
            **({"document": {"text": request.arguments[1][index]}} if shows else {}),
            "relevance_score": outputs[index].score,
        }
        for index in order
    ]
    return {"id": f"rerank-{name}", **head, "results": results, "usage": counted}


def _prompts(name: str, value: Any) -> list[Any]:
    """The prompts in a value, which must not be empty."""
    prompts = prompts_of(name, value)
    if not value:
        raise ValueError(f"{name} must not be empty, got {shorten_json(value)}")
    return prompts


def _required(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise ValueError(f"{name} is missing")
    return body[name]


def _score_options(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in SCORE_OPTIONS if name in body}


def _text_of(name: str, document: Any) -> str:
    """The text of a document, which is a text or an object with one."""
    text = document.get("text") if isinstance(document, Mapping) else document
    if not isinstance(text, str):
        raise TypeError(
            f"{name} must be a text or an object with a text, got {shorten_json(document)}"
        )
    return text


def _base64(vector: list[float]) -> str:
    """The numbers as float32, little-endian."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def usage(nums_tokens: Any) -> dict[str, int]:
    """The counts of an answer without generated tokens."""
    number = sum(nums_tokens)
    return {"prompt_tokens": number, "total_tokens": number}
