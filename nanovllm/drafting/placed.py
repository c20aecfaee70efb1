"""Where the layers of heads are made."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.engine.start.placement import Placement


@contextmanager
def made_on(placement: Placement) -> Iterator[None]:
    """A block in which tensors are made with a placement's type, on its device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device, torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(previous)
