"""The last tokens of a prompt that an output's text depends on, where it is not the last alone.

This is so behind special tokens that are skipped, byte-fallback tokens and parts of a character.
"""

from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.token_pieces import REPLACEMENT, token_pieces
from nanovllm.engine.schedule.sequence import Sequence

MOST = 64  # tokens that are looked at: a prompt may have a hundred thousand of one kind


def prompt_context(tokenizer: Any, skip_special_tokens: bool, seq: Sequence) -> list[int]:
    """The prompt's tokens from the last one on whose text is the same behind any other.

    If there is none among the last MOST tokens, or the tokenizer's kind of decoder is unknown, the
    list is empty, and the output's text begins as a text of its own.
    """
    num_tokens, pieces = seq.num_prompt_tokens, token_pieces(tokenizer, skip_special_tokens)
    last = seq.token_ids[max(0, num_tokens - MOST) : num_tokens]
    if not pieces.are_known:
        return []
    for start in reversed(range(len(last))):
        if pieces[last[start]] is not None:
            return last[start:]
    return last if num_tokens <= MOST else []


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
            self._pass_window()

    def _pass_window(self) -> None:
        """Count all text as emitted, except the bytes of a character that is not whole."""
        text, size = self._decode(self._window), len(self._window)
        ends = (self._decode(self._window[: size - cut]) for cut in range(4))
        whole = next((end for end in ends if not end.endswith(REPLACEMENT)), text)
        self._num_emitted, self._pending = len(whole), text[len(whole) :]
        before = self._decode(self._token_ids)
        self._pieces = [before[: len(before) - len(self._pending)]]
