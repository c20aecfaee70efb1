"""The choice of a rank's backend. Plain PyTorch is built here.

The other modules of this package are loaded when a fast backend may be chosen.
"""

from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import AttentionSpec, Backend, TorchBackend


def choose_backend(name: str, *specs: AttentionSpec) -> Backend:
    """Build the backend `name` with its kernels; "auto" is the fastest one that works here.

    There is one of the `specs` for each kind of heads that layers have. A ValueError says what
    fails.
    """
    if name == "torch":
        return _plain(*specs)
    from nanovllm.layers.backends import choice

    if name != "auto":
        return choice.build_backend(name, *specs)
    return choice.fastest(*specs) or _plain(*specs)


def _plain(*specs: AttentionSpec) -> Backend:
    if specs[0].one_order:
        raise ValueError("batch_invariant=True needs the kernels of 'triton' or 'cpu', not 'torch'")
    has_scores = any(spec.needs for spec in specs)
    return Backend(TorchBackend(specs[0].block_size, has_scores), PLAIN)
