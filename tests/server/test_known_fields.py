"""Fields that vLLM's server has: each is taken, or refused with what to use. No server runs."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.chat.answers import PLAIN
from nanovllm.chat.template_fields import reads, variables_of
from nanovllm.command.parser import make_parser
from nanovllm.engine.remote.readers import Readers
from nanovllm.from_vllm.names.fields import EMBEDDING, SCORING
from nanovllm.openai.chunks import ChunkWriter
from nanovllm.openai.fields import CHAT, COMPLETIONS, KNOWN, OTHERS
from nanovllm.openai.plain_prompts import without_special
from nanovllm.openai.request import parse_body
from nanovllm.openai.vectors import (
    OTHER_NAMES,
    parse_embeddings,
    parse_rerank,
    parse_score,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.generation import Generation
from nanovllm.server.options import ServerOptions
from nanovllm.server.tokens import TokenAnswering, TokensRequest

GENERATION = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p
    repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id return_tokens_as_token_ids
    return_token_ids return_token_offsets cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget
"""
# The fields of vLLM 0.26.0.
VLLM = {
    CHAT: f"""{GENERATION} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text return_assistant_tokens_mask""",
    COMPLETIONS: f"{GENERATION} prompt suffix prompt_embeds",
}
POOLED = """
    model user truncate_prompt_tokens truncation_side request_id priority mm_processor_kwargs
    cache_salt
"""
SCORES = f"""{POOLED} use_activation max_tokens_per_query max_tokens_per_doc instruction
    chat_template_kwargs"""
ANY: Any = object()


@pytest.mark.parametrize(
    ("url", "name"), [(url, name) for url, names in VLLM.items() for name in names.split()]
)
def test_a_field_is_known_or_refused_by_name(url: str, name: str) -> None:
    assert (name in KNOWN[url]) != (name in OTHERS[url])
    if name in KNOWN[url]:
        return
    body: dict[str, Any] = dict(messages=[{}]) if url == CHAT else dict(prompt="a")
    for value in OTHERS[url][name].accepts:
        parse_body(url, {**body, name: value}, {})
    with pytest.raises(ValueError, match=f"^{name}=") as caught:
        parse_body(url, {**body, name: [1]}, {})
    assert str(caught.value).endswith(OTHERS[url][name].why.replace("`", ""))


@pytest.mark.parametrize(
    ("parse", "body", "names", "others"),
    [
        (
            parse_embeddings, dict(input="a"),
            f"""{POOLED} add_special_tokens encoding_format embed_dtype endianness dimensions
                use_activation messages""",
            EMBEDDING,
        ),
        (parse_rerank, dict(query="a", documents=["b"]), f"{SCORES} top_n", SCORING),
        (parse_score, dict(queries="a", documents=["b"]), SCORES, SCORING),
    ],
    ids=["embeddings", "rerank", "score"],
)  # fmt: skip
def test_fields_of_vectors(parse: Any, body: Any, names: str, others: Any) -> None:
    for name in names.split():
        with contextlib.suppress(TypeError, ValueError):
            parse({**body, name: ANY})
        with pytest.raises((TypeError, ValueError), match="unknown field 'no_such'"):
            parse({**body, name: body.get(name), "no_such": 1})
        for value in others[name].accepts if name in others else ():
            parse({**body, name: value})
    for first, second in zip(*[iter(OTHER_NAMES)] * 2, strict=True):
        assert parse_score({first: "a", second: "b"}).arguments == (["a"], ["b"])


def test_an_activation_is_a_normalization() -> None:
    assert parse_embeddings(dict(input="a", use_activation=False)).options["normalize"] is False
    with pytest.raises(ValueError, match="give one of them"):
        parse_embeddings(dict(input="a", use_activation=True, normalize=True))


def test_only_variables_of_a_template_count() -> None:
    """Not a name in its text, in a comment, or that it sets itself."""
    template = (
        "{# effort #}thinking{% set own = 1 %}{{ own }}{% for m in messages %}{{ m.kind }}"
        "{% generation %}{% endgeneration %}{% if m %}{% break %}{% endif %}{% endfor %}"
        "{% if level is not defined %}{% set level = 'low' %}{% endif %}{{ level }}"
        "{% macro f() %}{{ inner }}{% endmacro %}{{ f() }}"
    )
    assert variables_of(template) == {"messages", "level", "inner"}
    assert variables_of("{% if %}") is None
    assert reads("{% if %} level", "level") and not reads("{% if %} levels", "level")


PROMPT = {"prompt_token_ids": [1, 2]}


class LLM:
    """An engine whose chat template reads nothing but `documents`."""

    readers: Any = None
    config: Any = None

    def unread_fields(self, **options: Any) -> list[str]:
        return [name for name in options if name != "documents"]

    async def chat_turn(self, _: Any, params: SamplingParams, **options: Any) -> Any:
        assert options == {"documents": []}
        return SimpleNamespace(params=params, answer=PLAIN, prompt=PROMPT)


def test_a_server_may_let_fields_pass_that_have_no_effect() -> None:
    options = ServerOptions(allow_unread_fields=True)
    generation = Generation(LLM(), ANY, options)  # type: ignore[arg-type]
    fields = dict(reasoning_effort="low", thinking={"type": "enabled"}, documents=[])
    asked = parse_body(CHAT, dict(messages=[{}], stream=True, **fields), {})
    found, prompts = asyncio.run(generation._prepare(asked))
    assert prompts == [PROMPT] and found.no_effect == ("reasoning_effort", "thinking")
    chunk = ChunkWriter("a", found, 0, "m", None, 1).usage_chunk(1, 1, 0)
    assert chunk["fields_without_effect"] == found.no_effect


def test_tokenize_lets_the_same_fields_pass() -> None:
    llm = LLM()
    llm.readers, llm.config = Readers(), SimpleNamespace(max_model_len=9)
    options = ServerOptions(allow_unread_fields=True)
    tokens = TokenAnswering(llm, ANY, options)  # type: ignore[arg-type]
    asked = parse_body(CHAT, dict(messages=[{}], reasoning_effort="low", documents=[]), {})
    line: Any = SimpleNamespace(rename=lambda _: None)
    answer = asyncio.run(tokens._tokenized(line, TokensRequest(None, asked, False, False)))
    assert answer["count"] == 2 and answer["fields_without_effect"] == ("reasoning_effort",)
    llm.readers.close()


def test_a_prompt_without_special_tokens() -> None:
    class Tokenizer:
        def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
            return [0] * add_special_tokens + [*text.encode()]

    (prompt,) = parse_body(COMPLETIONS, dict(prompt="ab", cache_salt="s"), {}).prompts
    for given in (prompt, "ab"):
        found = without_special(Tokenizer(), SamplingParams(), 9, given)
        assert found["prompt_token_ids"] == [97, 98] and found["prompt"] == "ab"
    assert found.keys() != prompt.keys() and "cache_salt" in prompt
    assert without_special(Tokenizer(), SamplingParams(), 9, [1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("serve m --served-model-name a b", ["a", "b"]),
        ("serve --port 1 --verbose m --served-model-name a b --port 2", ["a", "b"]),
        ("serve m --served-model-name a b --served-model-name c", ["a", "b", "c"]),
        ("serve m --served-model-name=a b", ["a", "b"]),
        ("serve --served-model-name a b --model m", ["a", "b"]),
        ("serve --served-model-name a m --port 1", ["a"]),
        ("serve --served-model-name=a m --served-model-name=b", ["a", "b"]),
    ],
)
def test_several_names_follow_the_flag(argv: str, names: list[str]) -> None:
    """After the model, or with `--model`. Before it, the second text is the model."""
    args = make_parser().parse_args(argv.split())
    model = getattr(args, "model", args.model_name)
    assert model == "m" and args.served_model_name == names
