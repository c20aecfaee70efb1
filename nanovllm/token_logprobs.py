"""TokenLogprobs: the log-probabilities at one position by token id, as vLLM's outputs have them."""

import warnings
from collections.abc import Iterable
from typing import Any

from nanovllm.outputs import Record, TokenLogprob


class TokenLogprobs(dict[int, TokenLogprob]):
    """A dict by token id: the token itself first, then the most likely others.

    `entry[7]` is the token with the id 7. In the list that `output["logprobs"]` has in its place,
    it would be the eighth token: where an entry has both, and they differ, a warning says so.
    """

    def __init__(self, tokens: Iterable[TokenLogprob]) -> None:
        super().__init__((token["token_id"], token) for token in tokens)

    @property
    def first(self) -> TokenLogprob:
        """The token itself, which was generated or is in the prompt."""
        return next(iter(self.values()))

    def __getitem__(self, token_id: int) -> TokenLogprob:
        if not isinstance(token_id, int) or token_id not in self:
            raise KeyError(
                f"no token {token_id!r} in this entry, a dict by token id; `first` is the token"
                ' itself, and output["logprobs"] has lists'
            )
        if token_id < len(self) and list(self)[token_id] != token_id:
            warnings.warn(
                f"entry[{token_id}] is the token with this id, as in vLLM; `first` is the token"
                ' itself, and output["logprobs"] has lists',
                stacklevel=2,
            )
        return super().__getitem__(token_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLogprobs, ([*self.values()],)


def by_token_id(record: Record, name: str) -> list[Any] | None:
    """The entries of an output's field as dicts by token id; made once."""
    entries = record[name]
    if entries is None:
        return None
    made: list[Any]
    source, made = vars(record).get(f"_{name}", (None, []))
    if source is not entries or len(made) != len(entries):
        made = [None if entry is None else TokenLogprobs(entry) for entry in entries]
        vars(record)[f"_{name}"] = entries, made
    return made
