"""The bodies of vLLM's /pooling: requests and responses. It knows no engine."""

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from nanovllm.from_vllm.names.fields import EMBEDDING
from nanovllm.openai.field_kinds import Kind, check_kinds, choice
from nanovllm.openai.fields import given_fields
from nanovllm.openai.vectors import (
    EMBED_FIELDS,
    EMBED_KINDS,
    EMBED_OPTIONS,
    VectorRequest,
    usage,
    vector_request,
)
from nanovllm.vectors.outputs import PooledOutput

if TYPE_CHECKING:
    import numpy as np

POOLING = "/pooling"
VECTOR, STATES = "embed", "token_embed"  # tasks, by vLLM's names
STATES_OPTIONS = ("pooling", "truncate_prompt_tokens", "cache_salt")
POOLING_FIELDS = ("input", "task", *EMBED_FIELDS)
POOLING_KINDS: dict[str, Kind] = {**EMBED_KINDS, "task": choice(VECTOR, STATES)}
NUMBERS_AT_ONCE = 1 << 14  # of states, which take about a millisecond
CODED_AT_ONCE = 3 << 18  # bytes; a multiple of three, so that base64 has no padding in between


def parse_pooling(body: Mapping[str, Any]) -> tuple[str, VectorRequest]:
    """The task in a body, and its request; a field that is null counts as missing."""
    body = given_fields(body, POOLING_FIELDS, EMBEDDING)
    check_kinds(body, POOLING_KINDS)
    task: str = body.get("task", STATES)
    if task == VECTOR:
        return task, vector_request(body, name="input")
    for name in (*EMBED_OPTIONS, "use_activation"):
        if name in body and name not in STATES_OPTIONS:
            raise ValueError(f'{name} needs "task": "{VECTOR}"; states are as the model has them')
    return task, vector_request(body, pooling="all")


def pooling_head(
    name: str, request: VectorRequest, outputs: Sequence[PooledOutput], model: str
) -> dict[str, Any]:
    """The body that answers /pooling, without its data: a `pooling_entry` for each output."""
    return {
        "id": f"pool-{name}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model or model,
        "usage": usage(output.num_prompt_tokens for output in outputs),
    }


def pooled_values(output: Any) -> "np.ndarray[Any, Any]":
    """The vector of an input, or the states of its tokens, in float32."""
    import numpy as np

    values = getattr(output, "embedding", None) or output.outputs.data
    return np.ascontiguousarray(values, "<f4")


def pooling_entry(
    request: VectorRequest, index: int, values: "np.ndarray[Any, Any]"
) -> Iterator[bytes]:
    """An input's entry as parts of JSON, between which other threads run."""
    yield orjson.dumps({"object": "pooling", "index": index})[:-1] + b',"data":'
    if request.encoding_format == "base64":
        yield b'"'
        data = values.tobytes()
        for start in range(0, len(data), CODED_AT_ONCE):
            yield base64.b64encode(data[start : start + CODED_AT_ONCE])
        yield b'"}'
    elif values.ndim == 1:  # as /v1/embeddings writes it
        yield orjson.dumps(values.tolist()) + b"}"
    else:
        size = max(1, NUMBERS_AT_ONCE // values.shape[1])
        for start in range(0, len(values), size):
            rows = orjson.dumps(values[start : start + size], option=orjson.OPT_SERIALIZE_NUMPY)
            yield (b"," if start else b"[") + rows[1:-1]
        yield b"]}"


def joined_body(head: Mapping[str, Any], entries: Sequence[Sequence[bytes]]) -> bytes:
    """The body with its data, as JSON."""
    parts = [orjson.dumps(head)[:-1], b',"data":[']
    for index, entry in enumerate(entries):
        parts += [b","] if index else []
        parts += entry
    return b"".join([*parts, b"]}"])
