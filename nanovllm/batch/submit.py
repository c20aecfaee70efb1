"""Check a line's request and queue it in an engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.batch.digests import digest_of
from nanovllm.batch.envelope import parse_request
from nanovllm.llm import LLM
from nanovllm.lora_request import LoRARequest
from nanovllm.openai.plain_prompts import without_special
from nanovllm.openai.request import CHAT
from nanovllm.openai.response import response_body
from nanovllm.openai.vectors import VectorRequest, embedding_entry, embeddings_body
from nanovllm.outputs import RequestOutput
from nanovllm.utils.slices import finish


def check_tokenizer(llm: LLM) -> None:
    """Raise if the model has no tokenizer: no line could be answered with text."""
    if llm.tokenizer is None:
        raise RuntimeError(f"{llm.config.model} has no tokenizer; --tokenizer names one")


class Submitted(NamedTuple):
    """A line's requests in the engine, and the samples that each has.

    `body(name, outputs)` makes the response's body when all have finished; `name` is for its id.
    """

    request_ids: list[int]
    num_samples: int
    body: Callable[[str, list[RequestOutput]], dict[str, Any]]


def submit(
    llm: LLM, custom_id: str, line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Submitted:
    """Queue a line's requests: one, or for an embedding one for each input.

    `defaults` are sampling parameters for lines without them. A line without a seed gets one that
    depends on `custom_id`. A bad line is a TypeError or ValueError and changes nothing in the
    engine; an error that every line would have is a RuntimeError.
    """
    seed = digest_of(custom_id, llm.config.seed) >> 1
    request = parse_request(line, {"seed": seed, **defaults})
    if isinstance(request, VectorRequest):
        return _submit_vectors(llm, request)
    (prompt,) = request.prompts
    if request.url == CHAT:
        if not llm.has_chat_template:
            raise RuntimeError(f"the tokenizer has no chat template for {custom_id!r}")
        (turn,) = llm.chat_turns([prompt], request.params, **request.chat_options)
        prompt = turn.prompt
        request = replace(request, params=turn.params, answer=turn.answer)
    elif not request.adds_special:
        prompt = without_special(llm.tokenizer, request.params, llm.config.max_model_len, prompt)
    request_id = llm.add_request(prompt, request.params, llm.adapters.named(request.model))

    def body(name: str, outputs: list[RequestOutput]) -> dict[str, Any]:
        return finish(response_body(name, request, outputs, llm.config.model, llm.tokenizer))

    return Submitted([request_id], request.params.n, body)


def _submit_vectors(llm: LLM, asked: VectorRequest) -> Submitted:
    plan = llm.parts.vectors.planner.embed(*asked.arguments, **asked.options)
    adapter = llm.adapters.named(asked.model)
    known: dict[LoRARequest, Any] = {}
    accepted = [llm.intake.adapted(one, adapter, known) for one in plan.accepted]
    ids = [llm.enqueue(one) for one in accepted]
    requests = [llm.requests.unfinished[request_id] for request_id in ids]

    def body(_: str, __: list[RequestOutput]) -> dict[str, Any]:
        outputs = plan.outputs(requests)
        data = [embedding_entry(asked, *entry) for entry in enumerate(outputs)]
        return embeddings_body(asked, outputs, llm.config.model, data)

    return Submitted(ids, 1, body)
