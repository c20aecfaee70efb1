"""Kernels: which function computes which operation. Here is the set of plain ones.

`cpu/table.py` and `triton/table.py` have the others. A set of kernels imports a kernel's module at
the first use of the kernel.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, dtype

if TYPE_CHECKING:
    from nanovllm.kernels.kv_layer import KVLayer
    from nanovllm.kernels.operands.cuts import Cuts
    from nanovllm.kernels.operands.low_rank import LowRank
    from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
    from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
    from nanovllm.kernels.plain.norm_rope_store import Rope
    from nanovllm.kernels.plain.read_table import Decoding, TableState
    from nanovllm.kernels.triton.experts.route import Router
    from nanovllm.kernels.triton.linear.few_rows import FewRows
    from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels


class Rounding(Protocol):
    """Kernels like those of `Kernels` that round their results to the codes of a weight's type.

    `arranged_linear` or `block_linear` takes such rows.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Any: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /
    ) -> tuple[Any, Tensor]: ...

    def silu_and_mul(self, x: Tensor, /) -> Any: ...


class Kernels:
    """One function for each operation; that of PLAIN defines the signature and the result.

    PLAIN_PLACES lists all operations. Here are those whose types are known, and do not only return
    a tensor.

    `arrange` copies a quantized weight into the layout that `arranged_linear`, `experts` and
    `few_rows` read, and `arrange_blocks` a BlockMatrix for `block_linear` and `block_rows`.
    `arrange_plain` does this for a plain weight, if it makes products faster, and `plain_of`
    restores it; an embedding's table may stay where it is. With `reads_plain`, kernels read plain
    weights in PyTorch's layout, so a library's layout may not replace it. With `reads_stacks`,
    `experts` reads the experts' weights as one stack, else as a list of matrices.

    Some operations exist only for some implementations: PLAIN returns None for them. `rounding`
    returns kernels that round a number of rows for a quantized weight; `arranged_linear` and
    `block_linear` accept rounded rows and plain rows. `few_rows` returns kernels that fuse several
    operations of a layer, for types with which they are faster. `router` returns a kernel for a
    router's weight and rows of a type. `write_table` writes words from the host's memory.
    `peers` exchange few rows between GPUs.

    The first call of an operation imports its module, and replaces the attribute by the function.
    """

    name: str
    graph_safe: bool  # whether CUDA graphs can contain them: no function of a decode step syncs
    reads_plain: bool
    reads_stacks: bool
    avoids_pytorch: bool = False  # layers call our functions where those of PyTorch have no order
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    norm_rope_store: Callable[
        [Tensor, int, "Rope", tuple[Tensor, Tensor] | None, float, "KVLayer", Tensor],
        tuple[Tensor, Tensor, Tensor],
    ]
    store_kvcache: Callable[[Tensor, Tensor, "KVLayer", Tensor], tuple[Tensor, Tensor]]
    mask: Callable[[Tensor, Tensor], None]
    sample: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    sample_masked: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor], None]
    draw: Callable[[Tensor, Tensor, Tensor, "Cuts"], Tensor]
    read_table: Callable[["TableState", int, int, int, int], "Decoding"]
    guess_ngrams: Callable[["TableState", int, int, int, int], None]
    guess_inputs: Callable[["TableState", "Kept | None", int, int, int], "GuessInputs"]
    accept: Callable[["TableState", "Decoding", Tensor, int], Tensor]
    arrange: Callable[["QuantizedMatrix"], Any]
    arrange_blocks: Callable[[Any], Any]
    arrange_plain: Callable[..., Any | None]  # of a weight; if it is a table; if it has a bias
    plain_of: Callable[[Any], Tensor | None]
    arranged_linear: Callable[[Any, Any, Tensor | None], Tensor]
    block_linear: Callable[[Any, Any, Tensor | None], Tensor]
    block_rows: Callable[[Any, Tensor, dtype], Tensor]
    group_rows: Callable[[Tensor, int], Any]
    lora_down: Callable[[Tensor, "LowRank", Any], Tensor]
    lora_up: Callable[[Tensor, "LowRank", Any, Tensor, Tensor | None], None]
    rounding: Callable[[Any, int], Rounding | None]
    few_rows: Callable[[list[Any], dtype], "FewRows | None"]
    router: Callable[..., "Router | None"]  # as `Router.of`
    write_table: Callable[[Tensor, Tensor, int], None] | None
    peers: "type[PeerKernels] | None"

    def __init__(
        self,
        name: str,
        places: Mapping[str, str],
        *,
        graph_safe: bool = False,
        reads_plain: bool = False,
        reads_stacks: bool = False,
        **others: Any,
    ) -> None:
        """`places` has the operations to import, as PLAIN_PLACES; `others` are those at hand."""
        self.name, self.graph_safe = name, graph_safe
        self._places, self.reads_plain, self.reads_stacks = places, reads_plain, reads_stacks
        vars(self).update(others)

    def __getattr__(self, operation: str) -> Callable[..., Tensor]:
        if operation not in self._places:
            raise AttributeError(f"there is no operation {operation!r}")
        module, _, name = self._places[operation].partition(":")

        def first_call(*args: Any, **options: Any) -> Any:
            function = getattr(import_module(f"nanovllm.kernels.{module}"), name or operation)
            setattr(self, operation, function)
            return function(*args, **options)

        return first_call


def _same(weight: Any) -> Any:
    return weight


def nothing(*_: Any) -> None:
    """An operation that an implementation does not have."""


# Plain operations in modules of their own names.
OPERATIONS = (
    "rms_norm", "biased_experts", "norm_rope_store", "store_kvcache", "mask", "sample", "draw",
    "experts", "silu_and_mul", "read_table", "guess_ngrams", "guess_inputs", "accept", "gated_norm",
    "channel_delta", "block_rows", "gelu_and_mul", "choose_experts", "causal_conv", "gated_delta",
    "state_space", "sigmoid_and_mul", "latent_rows", "add_normed", "block_linear", "heads_linear",
    "row_sums", "mix_streams",
)  # fmt: skip
# The module of each operation, and its name there, if that is another one.
PLAIN_PLACES = {name: f"plain.{name}" for name in OPERATIONS} | {
    "add_rms_norm": "plain.rms_norm",
    "sample_masked": "plain.mask",
    "adapted_experts": "plain.experts",
    "arranged_linear": "plain.quantized_linear:quantized_linear",
    **dict.fromkeys(("group_rows", "lora_down", "lora_up"), "plain.lora"),
}

PLAIN = Kernels(
    "plain PyTorch", PLAIN_PLACES, arrange=_same, arrange_blocks=_same, arrange_plain=nothing,
    plain_of=nothing, rounding=nothing, few_rows=nothing, router=nothing, write_table=None,
    peers=None,
)  # fmt: skip
