"""Lists of token ids that callables on logits get, and cannot change."""

from typing import Any, NoReturn

from nanovllm.engine.schedule.sequence import Sequence


class FixedIds(list[int]):
    """A list that its reader cannot change. Its copies, slices and sums are plain lists."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("token ids cannot be changed; change a copy, list(token_ids)")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce__(self) -> Any:  # pickles and copies are plain, too
        return list, ([*self],)


class OutputIds(FixedIds):
    """The tokens after a prompt, and the drafts after them. A step adds only what is new."""

    _num_known = 0  # the first ones, which are no drafts

    def become(self, seq: Sequence, drafts: list[int]) -> None:
        """Take the output of `seq` and the drafts. The last token may have been replaced."""
        num_known = len(seq.token_ids) - seq.num_prompt_tokens
        kept = max(0, min(num_known, self._num_known) - 1)
        list.__setitem__(self, slice(kept, None), seq.token_ids[seq.num_prompt_tokens + kept :])
        list.extend(self, drafts)
        self._num_known = num_known
