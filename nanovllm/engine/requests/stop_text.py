"""TextUntilStop: a sequence's text as its tokens come, up to the string that stops it."""

import bisect
from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class TextUntilStop(OutputText):
    """The text of a sequence with stops. Text before `min_tokens` stops nothing.

    Stops are found as if the text came character by character, wherever tokens begin and end: the
    first complete stop ends the text, and of stops that end together the longest counts.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._stops = sorted(params.stop or ())
        self._most_held = max(map(len, self._stops)) - 1  # of an incomplete stop
        self._includes_stop = params.include_stop_str_in_output
        self._num_certain: int  # at the last call of `num_certain`
        super().__init__(tokenizer, params)

    def reset(self) -> None:
        """Start over: the next `update` adds every token again."""
        super().reset()
        self.stop = None
        self._num_certain = 0
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
        """How many characters of `text` are final: the rest may become part of a stop.

        A place where no stop begins is tested once, as more text does not change the result.
        """
        if self._finished or self.stop is not None:
            return self.num_chars
        first = max(self._num_certain, self.num_chars - self._most_held)
        end, place = self.part(first), 0
        while place < len(end) and not self._may_stop(end[place:]):
            place += 1
        self._num_certain = first + place
        return self._num_certain

    def _may_stop(self, start: str) -> bool:
        """Whether a stop begins with `start`: in sorted order the first stop from there on does."""
        at = bisect.bisect_left(self._stops, start)
        return at < len(self._stops) and self._stops[at].startswith(start)

    def _add_tokens(self, detokenizer: Detokenizer, seq: Sequence, new: range) -> None:
        for index in new:
            self._add(detokenizer.add(seq.token_ids[index]), index >= seq.min_num_tokens)

    def _add(self, piece: str, may_stop: bool) -> None:
        if self.stop is not None:
            return
        start = self.num_chars
        super()._add(piece, may_stop)
        if piece and may_stop:
            self._find_stop(start)

    def _find_stop(self, start: int) -> None:
        """Cut the text at the first stop that ends after `start`."""
        first = max(0, start - self._most_held)
        text, found = self.part(first), []
        for stop in self._stops:
            at = text.find(stop, max(0, start - first - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if found:
            end, at, self.stop = min(found)
            self._pieces = [self.text[: first + (end if self._includes_stop else at)]]
            self.num_chars = len(self._pieces[0])
