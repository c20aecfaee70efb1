"""OutputText: a sequence's text as its tokens come. `stop_text` has the one with stop strings."""

from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.token_pieces import token_pieces
from nanovllm.engine.schedule.parts import End
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def text_end(seq: Sequence) -> int:
    """The index after the last token that is in the text.

    A token that stopped the sequence is left out, unless the request includes stops.
    """
    stopped = seq.finish_reason == "stop" and seq.token_ids[-1] in seq.stop_token_ids
    left_out = stopped and not seq.params.include_stop_str_in_output
    return seq.num_known_tokens - left_out


def text_of(seq: Sequence, tokenizer: Any) -> str:
    """The text of a sequence that has not been followed, as an OutputText would have it."""
    first, skips = seq.num_prompt_tokens - 1, seq.params.skip_special_tokens
    piece = token_pieces(tokenizer, skips)[seq.token_ids[first]]
    if piece is None:
        from nanovllm.engine.requests.prompt_context import text_behind

        return text_behind(tokenizer, seq, text_end(seq))
    text: str = tokenizer.decode(seq.token_ids[first : text_end(seq)], skip_special_tokens=skips)
    return text[piece.num_first :]


class OutputText:
    """A follower with the text of one sequence; without a tokenizer there is none.

    It has `num_chars` characters, kept in pieces, so that a new token copies none of them.
    """

    stop: str | None = None  # the string that has ended the text
    _detokenizer: Detokenizer | None = None

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self.reset()

    def update(self, seq: Sequence) -> End | None:
        """Add the new tokens to the text; return the end that is found in them, if any."""
        if self._num_tokens > seq.num_known_tokens - seq.num_prompt_tokens:  # one was taken back
            self.reset()
        new = range(seq.num_prompt_tokens + self._num_tokens, text_end(seq))
        try:
            self._num_tokens += len(new)
            if self._tokenizer is not None and new:
                self._detokenizer = self._detokenizer or self._begin(seq)
                self._add_tokens(self._detokenizer, seq, new)
        except BaseException:  # an interrupt may leave anything half done: start over then
            self.reset()
            raise
        return None if self.stop is None else End("stop", self.stop)

    def finish(self, seq: Sequence) -> str:
        """Add the remaining tokens, and return the whole text."""
        self.update(seq)
        try:
            if self._detokenizer is not None:
                self._add(self._detokenizer.finish(), seq.num_tokens > seq.min_num_tokens)
        except BaseException:
            self.reset()
            raise
        return self.text

    @property
    def text(self) -> str:
        """The whole text, joined here. Where only its end is of interest, `part` reads less."""
        return "".join(self._pieces)

    def part(self, start: int, end: int) -> str:
        """The characters from `start` to `end`; reads only the pieces from `start` on."""
        first, at = len(self._pieces), self.num_chars
        while at > start:
            first -= 1
            at -= len(self._pieces[first])
        return "".join(self._pieces[first:])[start - at : end - at]

    @property
    def num_certain(self) -> int:
        """How many characters of the text are final."""
        return self.num_chars

    def reset(self) -> None:
        """Start over: the next `update` adds every token again."""
        self._pieces: list[str] = []
        self.num_chars = self._num_tokens = 0
        self._detokenizer = None

    def _begin(self, seq: Sequence) -> Detokenizer:
        """A Detokenizer that has come to the end of the prompt."""
        detokenizer = Detokenizer(self._tokenizer, self._skip_special_tokens)
        if not detokenizer.begin_behind(seq.token_ids[seq.num_prompt_tokens - 1]):
            from nanovllm.engine.requests.prompt_context import behind_prompt

            return behind_prompt(self._tokenizer, self._skip_special_tokens, seq)
        return detokenizer

    def _add_tokens(self, detokenizer: Detokenizer, seq: Sequence, new: range) -> None:
        self._add(detokenizer.add_all(seq.token_ids[new.start : new.stop]), may_stop=False)

    def _add(self, piece: str, may_stop: bool) -> None:  # noqa: ARG002
        """Add a piece of text, which may stop the sequence or come before `min_tokens`."""
        self._pieces.append(piece)
        self.num_chars += len(piece)
