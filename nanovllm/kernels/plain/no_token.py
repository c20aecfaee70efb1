"""Which rows give no token, and get NO_TOKEN.

Their scores are NaN for some tokens, infinite for several, or minus infinity for all. One infinite
score wins.
"""

import torch

NO_TOKEN = -1


def or_no_token(tokens: torch.Tensor, scores: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The tokens [B] of rows of scores [B, V] with the maxima `top` [B], or NO_TOKEN."""
    is_one = (top == torch.inf) & ((scores == torch.inf).sum(dim=1) == 1)
    return tokens.where(top.isfinite() | is_one, NO_TOKEN)
