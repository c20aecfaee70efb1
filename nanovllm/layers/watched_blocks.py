"""What a caller's function may change in blocks between two steps, besides the values of weights.

Code that has read the addresses of the blocks' tensors, and computes them without their modules,
asks here whether it still may. It does so in each step: 28 layers take 30 microseconds, or 250 if
weights have driven Python's objects out of the caches.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import contains

from torch import nn
from torch.nn.modules import module as torch_module

from nanovllm.kernels.cpu.library import address
from nanovllm.layers.attention import Attention
from nanovllm.layers.plus_one_norm import PlusOneRMSNorm


class WatchedBlocks:
    """The addresses of the small tensors of bound modules, and whether Python must call these.

    Small tensors are the factors of norms, biases and sinks: what `bind` does not replace.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        modules = [module for root in roots for module in root.modules()]
        self._parameters = [
            (module, name)
            for module in modules
            for name, value in module._parameters.items()
            if value is not None
        ]
        self._plus_one = [module for module in modules if isinstance(module, PlusOneRMSNorm)]
        self._attentions = [module for module in modules if isinstance(module, Attention)]
        self._attributes = [vars(module) for module in modules]
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        for module in modules:
            self._hooks += (module._forward_hooks, module._forward_pre_hooks)

    def addresses(self) -> list[int | None]:
        """Those of the tensors that the modules have now, always in the same order."""
        # `_parameters`, because a module's own lookup takes five times as long.
        found = [address(module._parameters[name]) for module, name in self._parameters]
        found += [address(norm.bound_factors) for norm in self._plus_one]
        return found + [address(attention.kv.sinks) for attention in self._attentions]

    def has_hooks(self) -> bool:
        """Whether a module has forward hooks or a `forward` of its own, which a step must call."""
        return any(self._hooks) or any(map(contains, self._attributes, repeat("forward")))
