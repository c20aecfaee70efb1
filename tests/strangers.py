"""Families from outside of the package, and what plain loops in PyTorch make of their prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from reference import NUM_STEPS, Case, decisive

import nanovllm
from nanovllm.models import family as families
from nanovllm.models.family import Family

LastLogits = Callable[[list[int]], torch.Tensor]  # [vocab], of the token after these


@contextmanager
def registered(name: str, family: Family) -> Iterator[None]:
    """A block in which the package knows a family."""
    before = dict(families.registered)
    nanovllm.register_model(name, family)
    try:
        yield
    finally:
        families.registered.clear()
        families.registered.update(before)


@torch.inference_mode()
def continued(logits_of: LastLogits, ids: list[int]) -> torch.Tensor:
    """The logits [NUM_STEPS, vocab] of the greedy continuation."""
    steps = []
    for _ in range(NUM_STEPS):
        steps.append(logits_of(ids))
        ids = [*ids, int(steps[-1].argmax())]
    return torch.stack(steps)


def loop_case(path: Path, logits_of: LastLogits, prompts: list[list[int]]) -> Case:
    """The model in `path`, and the prompts that decide something, with their continuations."""
    known = {tuple(prompt): continued(logits_of, prompt) for prompt in prompts}
    logits = torch.stack([known[tuple(prompt)] for prompt in prompts])
    kept = decisive(logits)
    logits = logits[kept]
    return Case(path, [prompts[i] for i in kept], logits.argmax(-1).tolist(), logits)
