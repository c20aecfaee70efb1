"""TextUntilStop: a sequence's text as its tokens come, up to the string that stops it."""

from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.requests.stop_search import stop_search
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class TextUntilStop(OutputText):
    """The text of a sequence with stops. Text before `min_tokens` stops nothing.

    Stops are found as if the text came character by character, wherever tokens begin and end: the
    first complete stop ends the text, and of stops that end together the longest counts.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._search = stop_search(tuple(params.stop or ()))
        self._includes_stop = params.include_stop_str_in_output
        super().__init__(tokenizer, params)

    def reset(self) -> None:
        """Start over: the next `update` adds every token again."""
        super().reset()
        self.stop = None
        self._state = self._search.start
        self._finished = False

    def finish(self, seq: Sequence) -> str:
        """Add the tokens that are left, and return the whole text."""
        try:
            text = super().finish(seq)
            self._finished = True
        except BaseException:
            self.reset()
            raise
        return text

    @property
    def num_certain(self) -> int:
        """How many characters of `text` are final: the rest may become part of a stop."""
        if self._finished or self.stop is not None:
            return self.num_chars
        return self.num_chars - self._search.num_held(self._state)

    def _add_tokens(self, detokenizer: Detokenizer, seq: Sequence, new: range) -> None:
        for index in new:
            self._add(detokenizer.add(seq.token_ids[index]), index >= seq.min_num_tokens)

    def _add(self, piece: str, may_stop: bool) -> None:
        if self.stop is not None:
            return
        super()._add(piece, may_stop)
        search, state = self._search, self._state
        if search.passes_over(state, piece):
            return
        for num_left, char in enumerate(piece, 1 - len(piece)):
            state = search.advance(state, char)
            if state.stop is not None and may_stop:
                self.stop = state.stop
                end = self.num_chars + num_left
                self._pieces = [self.text[: end if self._includes_stop else end - len(self.stop)]]
                self.num_chars = len(self._pieces[0])
                break
        self._state = state
