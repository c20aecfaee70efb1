"""GeneratedStates: the hidden states that a request asks for in addition to its tokens."""

import numpy as np
import torch

from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.vectors.pooling import KeptStates


class GeneratedStates(KeptStates):
    """The states of all tokens of a prompt, and one state for each generated token.

    The state of a generated token is the one that it was drawn from, which is the state of the
    token before it. So the state of the prompt's last token belongs to the first generated token.
    If a token is removed again, its state stays but is not read: the next token at its index
    replaces it. Only a request's first sample keeps the prompt's states.
    """

    generates = True

    def __init__(self, num_prompt_tokens: int, keeps_prompt: bool) -> None:
        super().__init__("all", num_prompt_tokens)
        self.wanted = range(num_prompt_tokens - 1 if keeps_prompt else 0)
        self._drawn: dict[int, Array] = {}  # by index in `token_ids`

    def add_drawn(self, index: int, state: Array) -> None:
        """Keep the state [1, hidden] in float32 from which the token at `index` was drawn."""
        self._drawn[index] = state

    @property
    def prompt(self) -> torch.Tensor:
        """The states [tokens, hidden] of those of the prompt's tokens that were computed."""
        parts = [self._parts[start] for start in sorted(self._parts)]
        if not self.wanted and self.num_tokens in self._drawn:
            parts.append(self._drawn[self.num_tokens])
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, 0)

    def generated(self, seq: Sequence) -> torch.Tensor:
        """The states [tokens, hidden] of the generated tokens that are known."""
        indices = range(seq.num_prompt_tokens, seq.num_known_tokens)
        kept = [self._drawn[index] for index in indices]
        return torch.from_numpy(np.concatenate(kept)) if kept else torch.empty(0, 0)
