"""The prompts of Qwen3-Embedding and Qwen3-Reranker, as their authors publish them."""

from typing import Any

from nanovllm.engine.requests.intake import LONG_TEXT
from nanovllm.engine.requests.text_bound import check_long_text

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def query_prefix(instruction: str) -> str:
    """The text before a query that is embedded. Documents are embedded as they are."""
    return f"Instruct: {instruction}\nQuery:"


def rerank_prompt(
    tokenizer: Any, max_model_len: int, instruction: str, query: str, document: str
) -> list[int]:
    """The token ids of a prompt after which the model says yes or no.

    Its three parts are encoded separately, so that no token has text of two parts. A text that
    certainly exceeds `max_model_len` is a ValueError, and is not encoded.
    """
    content = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    if len(content) > LONG_TEXT:
        check_long_text(tokenizer, content, max_model_len, f"max_model_len={max_model_len}")
    parts = (
        tokenizer.encode(text, add_special_tokens=False, verbose=False)
        for text in (BEFORE, content, AFTER)
    )
    return [token_id for part in parts for token_id in part]


def yes_and_no(tokenizer: Any) -> tuple[int, int]:
    """The tokens of the two answers; each must be a single token."""
    yes, no = (tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise ValueError(
            "method='yes_no' needs a tokenizer with one token for each of 'yes' and 'no', this"
            f" model's encodes them as {yes} and {no}"
        )
    return yes[0], no[0]
