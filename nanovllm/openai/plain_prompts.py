"""Prompts of completions that are tokenized without special tokens: `add_special_tokens` false."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.requests.intake import LONG_TEXT
from nanovllm.engine.requests.text_bound import check_long_text
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_text


def without_special(tokenizer: Any, params: SamplingParams, longest: int, prompt: Any) -> Any:
    """A prompt as token ids, if it is a text. A text that is certainly too long is an error.

    `longest` is the most tokens of prompt and answer.
    """
    parts = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = parts.get("prompt")
    if not isinstance(text, str):
        return prompt
    check_text("prompt", text)
    if len(text) > LONG_TEXT and params.truncate_prompt_tokens is None:
        why = f"max_model_len={longest} less one to generate"
        check_long_text(tokenizer, text, longest - 1, why)
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return {**parts, "prompt_token_ids": ids}
