"""The last tokens of a prompt that an output's text depends on, where it is not the last alone.

This is so behind special tokens that are skipped, and behind byte-fallback tokens.
"""

from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.token_pieces import REPLACEMENT, token_pieces
from nanovllm.engine.schedule.sequence import Sequence

MOST = 64  # tokens that are looked at: a prompt may have a hundred thousand of one kind


def prompt_context(tokenizer: Any, skip_special_tokens: bool, seq: Sequence) -> list[int]:
    """The end of the prompt, from the last token whose text does not depend on earlier tokens.

    If there is none among the last MOST tokens, if the prompt ends within a character, or if the
    tokenizer's kind of decoder is unknown, the list is empty: the text begins as one of its own.
    """
    num_tokens, pieces = seq.num_prompt_tokens, token_pieces(tokenizer, skip_special_tokens)
    last = seq.token_ids[max(0, num_tokens - MOST) : num_tokens]
    if not pieces.are_known:
        return []
    known = (start for start in reversed(range(len(last))) if pieces[last[start]] is not None)
    context = last[next(known, 0 if num_tokens <= MOST else len(last)) :]
    text: str = tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
    return [] if text.endswith(REPLACEMENT) else context


def behind_prompt(tokenizer: Any, skip_special_tokens: bool, seq: Sequence) -> Detokenizer:
    """A Detokenizer that has come to the end of a sequence's prompt."""
    context = prompt_context(tokenizer, skip_special_tokens, seq)
    if not context:
        return Detokenizer(tokenizer, skip_special_tokens)
    return DetokenizerBehind(tokenizer, skip_special_tokens, context)


def text_behind(tokenizer: Any, seq: Sequence, end: int) -> str:
    """The text of a sequence's tokens from its prompt up to `end`."""
    skips, ids = seq.params.skip_special_tokens, seq.token_ids[seq.num_prompt_tokens : end]
    if not ids or not token_pieces(tokenizer, skips).are_known:
        text: str = tokenizer.decode(ids, skip_special_tokens=skips)
        return text
    detokenizer = behind_prompt(tokenizer, skips, seq)
    return detokenizer.add_all(ids) + detokenizer.finish()


class DetokenizerBehind(Detokenizer):
    """A Detokenizer that has passed the tokens of a context, whose text it does not return."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, context: list[int]) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self.add_all(context)
        if not self._is_at_end:
            self._num_emitted, self._pending = len(self._decode(self._window)), ""
            self._pieces = [self._decode(self._token_ids)]
