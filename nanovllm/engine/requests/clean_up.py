"""Whether `decode` removes spaces before punctuation, of a tokenizer with the option for it."""

from typing import Any


def cleans_up(tokenizer: Any) -> bool:
    """Whether `decode` rewrites text. transformers 5 ignores the tokenizer's option for BPE."""
    from transformers import PreTrainedTokenizerFast

    name = "clean_up_tokenization"
    if getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name):
        return True
    return " ." not in tokenizer.decode(tokenizer.encode("a .", add_special_tokens=False))
