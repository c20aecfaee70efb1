"""BodyParser: the requests in bodies of chats and completions, within the server's limits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.request import APIRequest, parse_body
from nanovllm.server.adapters import ServedModels
from nanovllm.server.errors import APIError
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import (
    check_asked,
    check_beams,
    check_body,
    check_tokens,
    check_truncated,
    refuse_priority,
    refuse_templates,
)


class BodyParser:
    """Parses bodies; what asks for more than the server allows is an error.

    `defaults` are sampling parameters for each URL.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        models: ServedModels,
        options: ServerOptions,
        defaults: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._llm, self._models, self._options = llm, models, options
        self._defaults = defaults

    def parse(self, url: str, body: Mapping[str, Any]) -> APIRequest:
        """The request in a body for this URL."""
        check_body(body, self._options)
        asked = parse_body(url, body, self._defaults[url])
        asked = replace(asked, model=self._models.answering(asked.model))
        if not self._options.trust_request_chat_template:
            refuse_templates(asked)
        if not self._options.allow_priority:
            refuse_priority(asked, self._defaults[url])
        most = self._llm.config.max_num_seqs + self._llm.max_waiting
        if len(asked.prompts) * asked.params.n > most:
            raise APIError(
                400, f"prompts times n must be at most {most} (max_num_seqs and max_waiting), got"
                f" {len(asked.prompts)} times {asked.params.n}"
            )  # fmt: skip
        check_truncated(asked.prompts, asked.params.truncate_prompt_tokens, self._options)
        check_tokens(asked, self._options, self._llm.config.max_model_len)
        check_asked(asked, self._options, self._llm.model_config.vocab_size)
        if asked.beams is not None:
            check_beams(asked.beams, self._options, self._llm.intake.eos_token_ids)
        return asked
