"""ChatFormat: how a model writes reasoning and tool calls, and how a chat constrains its answer."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from nanovllm.chat.answers import AnswerFormat
from nanovllm.chat.conversation import (
    chat_texts,
    given_template,
    has_chat_template,
    own_keywords,
)
from nanovllm.chat.given_templates import check_templates, with_template_texts
from nanovllm.chat.harmony.turns import HarmonyTurns, uses_harmony
from nanovllm.chat.reasoning import END, START, reasoning_of
from nanovllm.chat.reasoning_budget import bounded_reasoning, budget_of
from nanovllm.chat.template_fields import unread_fields
from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tool_formats.grammar import answer_grammar
from nanovllm.chat.tool_formats.table import FORMATS, shown_format
from nanovllm.chat.tools import ToolChoice, described_tools, tool_choice_of
from nanovllm.engine.requests.intake import LONG_TEXT
from nanovllm.engine.requests.text_bound import check_long_text
from nanovllm.outputs import StreamEvent
from nanovllm.prompts import TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat's prompt, its parameters with the answer's constraint, and the answer's format."""

    prompt: TokensPrompt
    params: SamplingParams
    answer: AnswerFormat

    @property
    def asked(self) -> tuple[TokensPrompt, SamplingParams]:
        """What a request is made of."""
        return self.prompt, self.params


class ChatFormat:
    """How the model of a tokenizer answers chats.

    `tool_parser` and `reasoning_parser` are names, or None to read them from the chat template.
    Prompts have less than `max_model_len` tokens, to leave one to generate. If it `reads_files`, a
    given template may be a path.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str | None,
        reasoning_parser: str | None,
        max_model_len: int,
        reads_files: bool = False,
    ) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._reads_files = reads_files

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return has_chat_template(self._tokenizer)

    def turns(
        self,
        messages: Any,
        params_list: Callable[[int], list[SamplingParams]],
        *,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        cache_salt: str | None = None,
        thinking_token_budget: int | None = None,
        **keywords: Any,
    ) -> list[Turn]:
        """The turns to generate for one or several conversations; `keywords` go to the template.

        `params_list(n)` returns the parameters of n prompts. All prompts get the `cache_salt`, and
        the tokenizer's special tokens with `add_special_tokens`, which few templates need. The
        reasoning of an answer has at most `thinking_token_budget` tokens.
        """
        tools = described_tools(tools)
        choice = tool_choice_of(tools, tool_choice, parallel_tool_calls)
        shown = tools if choice.tools else None
        if self._reads_files:
            keywords = with_template_texts(self._tokenizer, keywords)
        keywords = check_templates(self._tokenizer, own_keywords(keywords))
        template = str(given_template(keywords) or self._template(choice))
        check_tools_shown(template, choice)
        texts = chat_texts(
            self._tokenizer, template, messages, shown, add_generation_prompt, keywords
        )
        budget = budget_of(thinking_token_budget, keywords.get("thinking"))
        turns = [
            self._turn(
                self._prompt(text, params, cache_salt, add_special_tokens), params, choice, template
            )
            for text, params in zip(texts, params_list(len(texts)), strict=True)
        ]
        return turns if budget is None else [self._bounded(turn, budget) for turn in turns]

    @staticmethod
    def _bounded(turn: Turn, budget: int) -> Turn:
        """The turn with at most `budget` tokens of reasoning."""
        asked = turn.params.structured_outputs
        assert asked is None or isinstance(asked, StructuredOutputs)
        bounded = bounded_reasoning(turn.answer.reasoning, asked, budget)
        params = dataclasses.replace(turn.params, structured_outputs=bounded)
        return dataclasses.replace(turn, params=params)

    @staticmethod
    def with_deltas(
        turns: list[Turn], source: Generator[StreamEvent, None, None]
    ) -> Generator[StreamEvent, None, None]:
        """Add the `delta` to each event of a stream of turns. Closing it closes `source`."""
        readers = [[turn.answer.reader() for _ in range(turn.params.n)] for turn in turns]
        with closing(source) as events:
            for event in events:
                reader = readers[event["index"]][event["sample"]]
                ended = event["finish_reason"] is not None
                event["delta"] = reader.feed(event["text"], ended, event["token_ids"])
                yield event

    def unread_fields(self, **options: Any) -> list[str]:
        """The fields among the options of `turns` that the chat template does not take."""
        tools = described_tools(options.get("tools"))
        choice = tool_choice_of(tools, options.get("tool_choice"))
        return unread_fields(str(given_template(options) or self._template(choice)), options)

    def _prompt(
        self, text: str, params: SamplingParams, salt: str | None, adds_special: bool
    ) -> TokensPrompt:
        """The prompt with this text. One that is certainly too long is not tokenized."""
        if params.truncate_prompt_tokens is None and len(text) > LONG_TEXT:
            why = f"max_model_len={self._max_model_len} less one to generate"
            check_long_text(self._tokenizer, text, self._max_model_len - 1, why)
        token_ids = self._tokenizer.encode(text, add_special_tokens=adds_special, verbose=False)
        prompt = TokensPrompt(prompt_token_ids=token_ids, prompt=text)
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    def _turn(
        self, prompt: TokensPrompt, params: SamplingParams, choice: ToolChoice, template: str
    ) -> Turn:
        if uses_harmony(template, self._tool_parser, self._reasoning_parser):
            return self._harmony_turn(prompt, params, choice)
        reasoning = reasoning_of(template, prompt["prompt"], self._reasoning_parser)
        thinks = reasoning is not None and reasoning.sure
        tools = self._tool_format(choice, template)
        changed: dict[str, Any] = {}
        asked = params.structured_outputs
        assert asked is None or isinstance(asked, StructuredOutputs)
        markers = () if tools is None else tools.markers
        if reasoning is not None:
            markers = (*markers, START, END)
        if markers and not self._special.isdisjoint(markers):
            changed["skip_special_tokens"] = False
        if tools is not None:
            asked = self._constraint(tools, choice, asked, thinks)
        if thinks and asked is not None and asked.after is None:
            asked = dataclasses.replace(asked, after=END)
        if reasoning is not None and asked is not None and asked.after == END:
            reasoning = dataclasses.replace(
                reasoning, inside=True
            )  # text before the answer is free
        if asked != params.structured_outputs:
            changed["structured_outputs"] = asked
        if changed:
            params = dataclasses.replace(params, **changed)
        return Turn(prompt, params, AnswerFormat(reasoning, tools, choice.tools))

    def _harmony_turn(
        self, prompt: TokensPrompt, params: SamplingParams, choice: ToolChoice
    ) -> Turn:
        turns = HarmonyTurns(self._tokenizer, self._tool_parser, self._reasoning_parser)
        answer = turns.answer([*prompt["prompt_token_ids"]], choice)
        asked = params.structured_outputs
        assert asked is None or isinstance(asked, StructuredOutputs)
        check_answer(asked, choice)
        asked = turns.constraint(answer, choice, asked)
        params = dataclasses.replace(params, skip_special_tokens=False, structured_outputs=asked)
        return Turn(prompt, params, AnswerFormat(harmony=answer))

    def _tool_format(self, choice: ToolChoice, template: str) -> ToolFormat | None:
        """How calls are written; None if none are to be read."""
        if not choice.tools or (self._tool_parser == "none" and not choice.required):
            return None
        if self._tool_parser == "none":
            raise ValueError("calls are not read (tool_parser='none'), and cannot be required")
        name = self._tool_parser or shown_format(template)
        if name is None and (choice.asked or choice.required):
            raise ValueError(
                "tools: the chat template shows no known way to write calls; name it with"
                f" tool_parser: one of {', '.join(FORMATS)}"
            )
        return None if name is None else FORMATS[name]

    def _constraint(
        self, tools: ToolFormat, choice: ToolChoice, asked: StructuredOutputs | None, thinks: bool
    ) -> StructuredOutputs | None:
        """The constraint of an answer that may or must be calls."""
        check_answer(asked, choice)
        if asked is not None and not asked.kind.startswith("json"):
            return asked  # it does not allow calls
        is_free = choice.is_free
        if asked is None and not choice.required and is_free:
            return None
        grammar = answer_grammar(tools, choice, self._literal, asked, blank_lines=thinks)
        return StructuredOutputs(grammar=grammar, after=None if asked is None else asked.after)

    def _literal(self, text: str) -> str:
        """A literal in Lark: the token that is this text, if there is one, or the text."""
        token_id = self._added.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    @functools.cached_property
    def _added(self) -> Mapping[str, int]:
        added: Mapping[str, int] = self._tokenizer.get_added_vocab()
        return added

    @functools.cached_property
    def _special(self) -> frozenset[str]:
        """The texts of special tokens, which answers do not include by default."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        return frozenset(str(token) for token in tokens if token.special)

    def _template(self, choice: ToolChoice) -> str:
        return tokenizer_template(self._tokenizer, bool(choice.tools))


def tokenizer_template(tokenizer: Any, has_tools: bool) -> str:
    """The tokenizer's chat template; if it has several, the one that transformers chooses."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        names = ("tool_use", "default") if has_tools else ("default",)
        template = next((template[name] for name in names if name in template), "")
    return str(template)


def check_answer(asked: StructuredOutputs | None, choice: ToolChoice) -> None:
    """Raise if an answer must be a call and something else."""
    if asked is not None and choice.required:
        raise ValueError(
            "structured_outputs, or response_format, are for answers that are no calls; with"
            " them tool_choice must be 'auto' or 'none'"
        )


def check_tools_shown(template: str, choice: ToolChoice) -> None:
    """Raise if the chat template would show the model no tools, whatever reads its calls."""
    if choice.tools and not re.search(r"\btools\b", template):
        raise ValueError("tools: the chat template knows no tools, so the model would not see them")
