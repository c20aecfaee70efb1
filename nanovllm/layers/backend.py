"""The choice of a rank's backend: attention, and the kernels of the other layers.

Plain PyTorch is built here. What the other backends need is loaded when one is asked for.
"""

from nanovllm.kernels.table import PLAIN
from nanovllm.layers.attention.base import AttentionSpec
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.layer import Backend


def choose_backend(name: str, *specs: AttentionSpec) -> Backend:
    """Build the backend `name` with its kernels; "auto" is the fastest one that works here.

    There is one of the `specs` for each kind of heads that layers have. A ValueError says what
    fails.
    """
    if name == "torch":
        return _plain(*specs)
    from nanovllm.layers.attention import choice

    if name != "auto":
        return choice.build_backend(name, *specs)
    return choice.fastest(*specs) or _plain(*specs)


def _plain(*specs: AttentionSpec) -> Backend:
    has_caps = any(spec.soft_cap for spec in specs)
    return Backend(TorchBackend(specs[0].block_size, has_caps), PLAIN)
