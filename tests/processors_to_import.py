"""Callables on logits that another process can import."""

import torch


def ban_even(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Leave odd tokens."""
    logits[::2] = -torch.inf
    return logits


def needs_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Leave out what has occurred."""
    logits[list({*prompt, *output})] = -torch.inf
    return logits


class Ban:
    """Leaves out some tokens."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[self.ids] = -torch.inf
        return logits
