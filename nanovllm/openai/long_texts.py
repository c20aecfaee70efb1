"""The text of many tokens, made in slices, so that other threads run in between."""

from collections.abc import Iterator, Sequence
from typing import Any

from nanovllm.engine.requests.token_pieces import TokenPieces, token_pieces

SLICE = 1 << 12  # tokens


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, as `tokenizer.decode` makes it."""
    pieces = token_pieces(tokenizer, False) if len(token_ids) > SLICE else None
    if pieces is None or not pieces.are_known:
        text: str = tokenizer.decode(token_ids)
        return text
    texts: list[str] = []
    follows = False  # whether a known token comes before the slice
    for part in _slices(token_ids, pieces):
        text = tokenizer.decode(part)
        piece = pieces[part[0]] if follows else None
        texts.append(text if piece is None else piece.text + text[piece.num_first :])
        follows = follows or any(name is not None for name in tokenizer.convert_ids_to_tokens(part))
    return "".join(texts)


def _slices(token_ids: Sequence[int], pieces: TokenPieces) -> Iterator[Sequence[int]]:
    """Slices that begin with a token that has the same text after any other token."""
    start = 0
    while start < len(token_ids):
        end = start + SLICE
        while end < len(token_ids) and pieces[token_ids[end]] is None:
            end += 1
        yield token_ids[start:end]
        start = end
