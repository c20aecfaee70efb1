"""Backend: how a rank computes attention, and the kernels of its other layers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.plain.read_table import DraftState, TableState
from nanovllm.kernels.table import PLAIN, Kernels, cpu_kernels, triton_kernels
from nanovllm.layers.attention.base import AttentionBackend, AttentionSpec
from nanovllm.layers.attention.choice import (
    build_attention,
    check_needs,
    fastest_first,
    in_short,
    one_block,
    tried,
)
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.cache_spec import Heads

logger = logging.getLogger("nanovllm")

Specs = Sequence[AttentionSpec]


class Backend(NamedTuple):
    """An attention backend, and the kernels of the other layers. `Layer.bind` receives it.

    `others` are of the same class and block size, for layers with other heads than the first ones.
    """

    attention: AttentionBackend
    kernels: Kernels
    others: tuple[AttentionBackend, ...] = ()

    def attention_of(self, heads: Heads) -> AttentionBackend:
        """The backend that plans for layers with these heads."""
        for attention in (self.attention, *self.others):
            if attention.heads is None or attention.heads == heads:
                return attention
        raise ValueError(f"`layer_shape` of the model's config has no layer with heads {heads}")

    @property
    def graph_safe(self) -> bool:
        """Whether a decode step reads all changing values from device tensors, without syncs."""
        return self.attention.graph_safe and self.kernels.graph_safe


def choose_backend(name: str, *specs: AttentionSpec) -> Backend:
    """Build the backend `name` with its kernels; "auto" is the fastest one that works here.

    There is one of the `specs` for each kind of heads that layers have.
    """
    if name != "auto":
        return build_backend(name, *specs)
    spec = specs[0]
    reasons = []
    for fast in fastest_first(spec.device):
        try:
            return build_backend(fast, *specs)
        except ValueError as error:
            logger.info("auto skips a backend: %s", error)
            reasons.append(str(error))
    is_slow = spec.device.type != "cpu" or spec.dtype == torch.float16  # which CPUs emulate
    level = logging.WARNING if is_slow else logging.INFO
    logger.log(level, "auto selects plain PyTorch: %s", "; ".join(reasons))
    return build_backend("torch", *specs)


def build_backend(name: str, *specs: AttentionSpec) -> Backend:
    """Build attention and kernels, and try both on one token; a ValueError says what fails."""
    if name == "torch":
        has_caps = any(spec.soft_cap for spec in specs)
        return Backend(TorchBackend(specs[0].block_size, has_caps), PLAIN)
    for spec in specs:
        check_needs(name, spec)

    def build() -> Backend:
        kernels = KERNELS[name](specs)
        attention, *others = (build_attention(name, spec) for spec in specs)
        return Backend(attention, kernels, tuple(others))

    return tried(name, build, specs[0].device)


def _triton_kernels(specs: Specs) -> Kernels:
    """The Triton kernels, if they are compiled for the device."""
    from nanovllm.kernels.triton.common import INTERPRETED

    if specs[0].device.type == "cuda" and INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted on the CPU")
    return _try_kernels(triton_kernels(), specs)


def _triton_kernels_or_plain(specs: Specs) -> Kernels:
    """The Triton kernels, else plain PyTorch: for attention that works without Triton."""
    try:
        return _triton_kernels(specs)
    except Exception as error:
        logger.warning("Triton does not work, so there are no decode graphs: %s", in_short(error))
        return PLAIN


KERNELS: dict[str, Callable[[Specs], Kernels]] = {
    "cpu": lambda specs: _try_kernels(cpu_kernels(), specs),
    "triton": _triton_kernels,
    "flash_attn": _triton_kernels_or_plain,
}


def _try_kernels(kernels: Kernels, specs: Specs) -> Kernels:
    """Run on one token the kernels that every model uses, to check that they compile here."""
    spec = specs[0]
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    x = torch.zeros(1, 2 * spec.head_dim, **options)
    weight = torch.ones(2 * spec.head_dim, **options)
    kernels.rms_norm(x, weight, 1.0)
    kernels.add_rms_norm(x, x, weight, 1.0)
    kernels.silu_and_mul(x)
    ones = torch.ones(1, device=spec.device)
    kernels.sample(x, ones, ones.long())
    one, word = ones.long(), ones.int()
    no_drafts = DraftState(word[None], word, word, word[None], word[None], word)
    table = TableState(one, one, word, ones, word - 1, word[None], no_drafts)
    kernels.read_table(table, 1, 1, 2, 1)
    for each in specs:
        _try_attention_inputs(kernels, each)
    matrix = torch.zeros(64, 64, **options)
    if (arranged := kernels.arrange_plain(matrix)) is not None:
        kernels.arranged_linear(matrix, arranged, None)
    if few_rows := kernels.few_rows([matrix], spec.dtype):
        for rows in (matrix[:1], matrix[:8]):
            _, scaled = few_rows.add(rows, matrix, None, rows, matrix[0], 1.0)
            few_rows.linear(scaled, matrix)
            few_rows.gated(scaled, matrix)
    return kernels


def _try_attention_inputs(kernels: Kernels, spec: AttentionSpec) -> None:
    """Rotate a token, and store nothing."""
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    qkv = torch.zeros(1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, **options)
    angles = torch.zeros(1, 1, spec.head_dim // 2, device=spec.device)
    no_slot = torch.full((1,), -1, device=spec.device)
    kv = one_block(spec, 1)
    kernels.norm_rope_store(qkv, spec.num_kv_heads, (angles, angles), None, 0.0, kv, no_slot)
