"""TokenCounts: how often each token occurs in a sequence, for its penalties."""

import numpy as np
import numpy.typing as npt

from nanovllm.engine.schedule.sequence import Sequence


class TokenCounts:
    """A follower with the distinct tokens of a sequence, and how often each is in the output."""

    _num_tokens: int  # how many of the sequence's tokens are counted
    _places: dict[int, int]

    def __init__(self) -> None:
        self.reset()

    def after(self, drafts: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The distinct tokens, and how often each would be in the output if `drafts` came next.

        0 for a token that only the prompt has. Drafts may be wrong, so they are not counted here.
        """
        number = len(self._places)
        ids, counts = self._ids[:number], self._counts[:number]
        if not drafts:
            return ids, counts
        new = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self._places]
        ids = np.append(ids, np.array(new, np.int64))
        counts = np.append(counts, np.zeros(len(new), np.int32))
        for token_id in drafts:
            place = self._places.get(token_id)
            counts[number + new.index(token_id) if place is None else place] += 1
        return ids, counts

    def update(self, seq: Sequence) -> None:
        """Count the tokens that are new."""
        if seq.num_known_tokens < self._num_tokens:  # one was taken back
            self.reset()
        for index in range(self._num_tokens, seq.num_known_tokens):
            place = self._place_of(seq.token_ids[index])
            self._counts[place] += index >= seq.num_prompt_tokens
        self._num_tokens = seq.num_known_tokens

    def reset(self) -> None:
        """Start over: the next `update` counts every token."""
        self._num_tokens = 0
        self._places = {}
        self._ids: npt.NDArray[np.int64] = np.zeros(256, np.int64)
        self._counts: npt.NDArray[np.int32] = np.zeros(256, np.int32)

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.resize(self._ids, 2 * place)
            self._counts = np.append(self._counts, np.zeros(place, np.int32))
        self._ids[place] = token_id
        return place
