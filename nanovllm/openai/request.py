"""Parse the body of a request to OpenAI's API into a prompt and `SamplingParams`.

Names are checked here, values by `SamplingParams`. Nothing is accepted and then ignored: unknown
fields are errors, and so are values that ask for something that is not supported. It knows no
engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.chat.answers import PLAIN, AnswerFormat
from nanovllm.openai.answer_form import USUAL, AnswerForm, answer_form, asks_for_prompt
from nanovllm.openai.beam_fields import beam_params
from nanovllm.openai.fields import BOOLS, INPUTS, SAMPLING, known_fields
from nanovllm.openai.fields import CHAT as CHAT
from nanovllm.openai.fields import COMPLETIONS as COMPLETIONS
from nanovllm.openai.guided import OWN, constraint_field, guided_outputs
from nanovllm.openai.response_format import structured_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.json_text import check_json_bool, shorten_json


@dataclass(frozen=True, slots=True)
class APIRequest:
    """The parsed body of a request. If `url` is CHAT, `prompts` is a list of one conversation.

    `chat_options` are further keywords of `LLM.chat`. `answer` says how a chat's answer is parsed.
    With `echo` a completion's text begins with the prompt, in front of which the tokenizer adds
    special tokens if it `adds_special`. `name` is the client's own id of the request, and
    `no_effect` are fields that the chat template does not take. With `beams` the answers are
    searched, not drawn. `constraint` is the field that constrains the answer, if there is one.
    """

    url: str
    prompts: list[Any]
    chat_options: Mapping[str, Any]
    params: SamplingParams
    model: str | None
    streams: bool = False
    echo: bool = False
    answer: AnswerFormat = PLAIN
    form: AnswerForm = USUAL
    adds_special: bool = True
    name: str | None = None
    no_effect: tuple[str, ...] = ()
    beams: BeamSearchParams | None = None
    constraint: str = OWN


def parse_body(url: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> APIRequest:
    """Parse a body for `url`; a field that is null counts as missing.

    `defaults` are sampling parameters for bodies without them.
    """
    body = known_fields(url, body)
    prompt_name, *option_names = INPUTS[url]
    if prompt_name not in body:
        raise ValueError(f"{prompt_name} is missing")
    prompt = body[prompt_name]
    if url == CHAT and not isinstance(prompt, list):
        raise TypeError(f"messages must be a list of messages, got {shorten_json(prompt)}")
    streams = body.get("stream", False)
    form, sampling = answer_form(body, streams), _sampling(body)
    prompts = [prompt] if url == CHAT else prompts_of(prompt_name, prompt)
    if url == COMPLETIONS and (salt := body.get("cache_salt")) is not None:
        prompts = [_salted(prompt, salt) for prompt in prompts]
    params = SamplingParams(**{**defaults, **sampling})
    return APIRequest(
        url=url,
        prompts=prompts,
        chat_options=_chat_options(body, option_names),
        params=params,
        model=body.get("model"),
        streams=streams,
        echo=body.get("echo", False),
        form=form,
        adds_special=body.get("add_special_tokens", True),
        beams=beam_params(body, sampling, params.max_tokens),
        name=body.get("request_id"),
        constraint=constraint_field(body),
    )


def _salted(prompt: str | list[int], salt: str) -> dict[str, Any]:
    """A prompt with the salt of its prefixes."""
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "cache_salt": salt}


def _chat_options(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Keywords of a chat; OpenAI's default of `tool_choice` is "auto" if there are tools."""
    given = {name: body[name] for name in names if name in body}
    continues = given.get("continue_final_message")
    if continues and given.setdefault("add_generation_prompt", False):
        raise ValueError("continue_final_message needs add_generation_prompt to be false")
    return {"tool_choice": "auto", **given} if given.get("tools") else given


def prompts_of(name: str, prompt: Any) -> list[Any]:
    """The prompts in a text, a list of token ids, or a list of either, in the field `name`."""
    if not isinstance(prompt, str | list):
        raise TypeError(
            f"{name} must be a text, token ids or a list of these, got {shorten_json(prompt)}"
        )
    if isinstance(prompt, str) or not any(isinstance(part, str | list) for part in prompt):
        return [prompt]
    if not all(isinstance(part, str | list) for part in prompt):
        raise TypeError(f"{name} must be all token ids, or all texts and lists of token ids")
    return prompt


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SamplingParams, from its own names and OpenAI's."""
    fields = {name: body[name] for name in SAMPLING if name in body}
    for name in fields.keys() & BOOLS:
        check_json_bool(name, fields[name])
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are the same; give one of them")
        fields["max_tokens"] = body["max_completion_tokens"]
    if asks_for_prompt(body):
        fields["max_tokens"] = 1  # it is dropped
    if body.get("echo") and "logprobs" in fields:
        fields.setdefault("prompt_logprobs", fields["logprobs"])
    if (best_of := body.get("best_of", 1)) != 1:
        fields["n"] = best_of
        if best_of > body.get("n", 1):
            fields.setdefault("logprobs", 0)  # the best samples are chosen by them
    if isinstance(body.get("logprobs"), bool) or "top_logprobs" in body:
        fields["logprobs"] = _num_chat_logprobs(body)
    if "response_format" in body:
        asked = structured_of(body["response_format"])
        if asked is not None and "structured_outputs" in fields:
            raise ValueError("give one of response_format and structured_outputs")
        if asked is not None:
            fields["structured_outputs"] = asked
    if (guided := guided_outputs(body)) is not None:
        fields["structured_outputs"] = guided
    if isinstance(biases := body.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
    return fields


def _num_chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """A chat's `logprobs` is true or false, and `top_logprobs` is their number."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    check_json_bool("logprobs (with top_logprobs)", wanted)
    if top and not wanted:  # 0 is the default of vLLM's clients
        raise ValueError("top_logprobs needs logprobs to be true")
    return int(top or 0) if wanted else None


def _token_id(text: str) -> int:
    """Parse a token id that is the key of a JSON object, where keys are always texts."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"logit_bias must have token ids as keys, got {shorten_json(text)}")
    return int(text)
