"""The bodies of vLLM's /pooling: requests and responses. It knows no engine."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.openai.fields import given_fields
from nanovllm.openai.vectors import (
    EMBED_FIELDS,
    EMBED_OPTIONS,
    VectorRequest,
    usage,
    vector_request,
)
from nanovllm.openai.vllm_fields import EMBEDDING
from nanovllm.utils.checks import check_choice
from nanovllm.vectors.outputs import PooledOutput

POOLING = "/pooling"
VECTOR, STATES = "embed", "token_embed"  # tasks, by vLLM's names
STATES_OPTIONS = ("pooling", "truncate_prompt_tokens", "cache_salt")
POOLING_FIELDS = ("input", "task", *EMBED_FIELDS)


def parse_pooling(body: Mapping[str, Any]) -> tuple[str, VectorRequest]:
    """The task in a body, and its request; a field that is null counts as missing."""
    body = given_fields(body, POOLING_FIELDS, EMBEDDING)
    task = body.get("task", STATES)
    check_choice("task", task, (VECTOR, STATES))
    if task == VECTOR:
        return task, vector_request(body, name="input")
    for name in (*EMBED_OPTIONS, "use_activation"):
        if name in body and name not in STATES_OPTIONS:
            raise ValueError(f'{name} needs "task": "{VECTOR}"; states are as the model has them')
    return task, vector_request(body, pooling="all")


def pooling_body(
    name: str, request: VectorRequest, outputs: Sequence[PooledOutput], model: str, data: list[Any]
) -> dict[str, Any]:
    """The body that answers /pooling; `data` has a `pooling_entry` for each output."""
    return {
        "id": f"pool-{name}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model or model,
        "data": data,
        "usage": usage(output.num_prompt_tokens for output in outputs),
    }


def pooling_entry(request: VectorRequest, index: int, output: Any) -> dict[str, Any]:
    """An input's entry: its vector, or the states of its tokens; as base64 in their order."""
    import numpy as np

    values = np.asarray(getattr(output, "embedding", None) or output.outputs.data, "<f4")
    as_text = request.encoding_format == "base64"
    data: Any = base64.b64encode(values.tobytes()).decode() if as_text else values.tolist()
    return {"object": "pooling", "index": index, "data": data}
