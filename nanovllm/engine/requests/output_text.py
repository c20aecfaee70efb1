"""OutputText: a sequence's text as its tokens come, up to the string that stops it."""

import bisect
from typing import Any

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.schedule.sequence import End, Sequence
from nanovllm.sampling_params import SamplingParams


def text_end(seq: Sequence) -> int:
    """The index behind the last token that the text is made of.

    A token that stopped the sequence is left out, unless the request includes stops.
    """
    stopped = seq.finish_reason == "stop" and seq.token_ids[-1] in seq.stop_token_ids
    left_out = stopped and not seq.params.include_stop_str_in_output
    return seq.num_known_tokens - left_out


class OutputText:
    """A follower with the text of one sequence; without a tokenizer there is none.

    Stops are found as if the text came character by character, wherever tokens begin and end: the
    first complete stop ends the text, and of stops that end together the longest counts.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._stops = sorted(params.stop or ())
        self._most_held = max(map(len, self._stops), default=1) - 1  # characters of a stop's start
        self._includes_stop = params.include_stop_str_in_output
        self._detokenizer: Detokenizer | None
        self._num_certain: int  # when it was last asked for
        self.reset()

    def update(self, seq: Sequence) -> End | None:
        """Add the tokens that are new; return the end at the stop that is reached, if any.

        Text before `min_tokens` stops nothing.
        """
        if self._num_tokens > seq.num_known_tokens - seq.num_prompt_tokens:  # one was taken back
            self.reset()
        new = range(seq.num_prompt_tokens + self._num_tokens, text_end(seq))
        try:
            self._num_tokens += len(new)
            if self._detokenizer is not None and new:
                self._add_tokens(self._detokenizer, seq, new)
        except BaseException:  # an interrupt may leave anything half done: start over then
            self.reset()
            raise
        return None if self.stop is None else End("stop", self.stop)

    def finish(self, seq: Sequence) -> str:
        """Add the tokens that are left, and return the whole text."""
        self.update(seq)
        try:
            if self._detokenizer is not None:
                self._add(self._detokenizer.finish(), seq.num_tokens > seq.min_num_tokens)
            self._finished = True
        except BaseException:
            self.reset()
            raise
        return self.text

    @property
    def num_certain(self) -> int:
        """How many characters of `text` are final: the rest may become part of a stop.

        A place where no stop begins is looked at once, as more text does not change that.
        """
        if not self._stops or self._finished or self.stop is not None:
            return len(self.text)
        place = max(self._num_certain, len(self.text) - self._most_held)
        while place < len(self.text) and not self._may_stop(self.text[place:]):
            place += 1
        self._num_certain = place
        return place

    def _may_stop(self, start: str) -> bool:
        """Whether a stop begins with `start`: then the first one that is not before it does."""
        at = bisect.bisect_left(self._stops, start)
        return at < len(self._stops) and self._stops[at].startswith(start)

    def reset(self) -> None:
        """Start over: the next `update` adds every token again."""
        self.text = ""
        self.stop: str | None = None
        self._num_tokens = self._num_certain = 0
        self._finished = False
        self._detokenizer = (
            None
            if self._tokenizer is None
            else Detokenizer(self._tokenizer, self._skip_special_tokens)
        )

    def _add_tokens(self, detokenizer: Detokenizer, seq: Sequence, new: range) -> None:
        if not self._stops:
            self.text += detokenizer.add_all(seq.token_ids[new.start : new.stop])
            return
        for index in new:
            self._add(detokenizer.add(seq.token_ids[index]), index >= seq.min_num_tokens)

    def _add(self, piece: str, may_stop: bool) -> None:
        if self.stop is not None:
            return
        start = len(self.text)
        self.text += piece
        if piece and may_stop:
            self._find_stop(start)

    def _find_stop(self, start: int) -> None:
        """Cut the text at the first stop that ends after `start`."""
        found = []
        for stop in self._stops:
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if found:
            end, at, self.stop = min(found)
            self.text = self.text[: end if self._includes_stop else at]
