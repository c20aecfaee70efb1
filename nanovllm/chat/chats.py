"""Chats: an engine answers conversations."""

import functools
from typing import Any

from nanovllm.chat.chat_format import ChatFormat, Turn
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.generation import Params, complete, params_list
from nanovllm.lora_request import LoRARequests
from nanovllm.outputs import RequestOutput


class Chats:
    """Makes prompts of conversations, and answers them."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine

    @property
    def format(self) -> ChatFormat:
        """The format of the engine's current tokenizer."""
        asked, most = self.engine.asked, self.engine.config.max_model_len
        parsers = asked.tool_parser, asked.reasoning_parser
        return ChatFormat(self.engine.tokenizer, *parsers, most, reads_files=True)

    def turns(self, messages: Any, sampling_params: Params, **options: Any) -> list[Turn]:
        """The prompts and parameters of conversations; the parameters are those of `generate`."""
        return self.format.turns(
            messages, functools.partial(params_list, sampling_params), **options
        )

    def answer(
        self, turns: list[Turn], lora_request: LoRARequests, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Complete the turns. Each output and sample has the answer as a `message`."""
        accepted = self.engine.intake.accept_all([turn.asked for turn in turns], lora_request)
        outputs = complete(self.engine, accepted, use_tqdm)
        for turn, output in zip(turns, outputs, strict=True):
            turn.answer.add_messages(output)
        return outputs
