"""What a rank's layers compute with: an attention backend, and the kernels of all other layers."""

from typing import NamedTuple

from nanovllm.kernels.table import Kernels
from nanovllm.layers.attention_backends import AttentionBackend, AttentionSpec, get_backend


class Backend(NamedTuple):
    """How attention is computed, and the kernels beside it. Layers take it by `bind`."""

    attention: AttentionBackend
    kernels: Kernels

    @property
    def graph_safe(self) -> bool:
        """Whether a decode step reads all that changes from device tensors, and never syncs."""
        return self.attention.graph_safe


def choose_backend(name: str, spec: AttentionSpec) -> Backend:
    """The backend `name` with its kernels; "auto" is the fastest that works there."""
    attention = get_backend(name, spec)
    return Backend(attention, attention.kernels)
