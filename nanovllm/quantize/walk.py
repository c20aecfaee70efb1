"""Walk: a text goes through a model one block after the other, with all samples in each block.

A decoder's `forward` computes all blocks, and families have decoders of their own. So it is called
for each block: the blocks before return what they returned when it was their turn, and the call
ends after the block. What comes before the blocks is computed again, which takes little time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import STATES, Context, attending
from nanovllm.layers.shared_kv import LendingAttention
from nanovllm.layers.state_mixer import StateMixer
from nanovllm.models.decoder import CausalLM

BACKEND = Backend(TorchBackend(), PLAIN)
CHUNK = 4096  # tokens that a block computes at a time
NUM_SLOTS = 2  # of states: zeros, and what is not kept
LENT = ("_lent", "_rows", "_num_left")  # what a LendingAttention keeps for the readers of a step


class Reached(Exception):  # noqa: N818 - it is no error
    """Ends a call of the model after the block whose turn it is."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class Chunk:
    """A few samples: their tokens, and what the last block before the present one has returned."""

    def __init__(self, samples: Sequence[Sequence[int]], device: torch.device) -> None:
        ends = np.array([0, *accumulate(map(len, samples))], np.int32)
        positions = np.concatenate([np.arange(len(sample)) for sample in samples])
        self.ids = torch.tensor([i for sample in samples for i in sample], device=device)
        self.positions = torch.as_tensor(positions, device=device)
        unused, starts = torch.full_like(self.ids, -1), torch.as_tensor(ends, device=device)
        longest = max(map(len, samples))
        self.context = Context(True, unused, starts, starts, longest, longest)
        before, kept = self.ids.new_zeros(len(samples)), np.full(len(self.ids), -1)
        self.states = StateStep(before, unused, ends, kept=kept)
        self.output: Any = None
        self.lent: list[dict[str, Any]] = []


class Walk:
    """The chunks of a text, and the block whose turn it is.

    `collect` computes the block and drops the results, for hooks on its layers. `move` computes it
    with the weights that it then has, and goes on to the next block. Attention and states are plain
    PyTorch's: each sample is a prompt, and nothing is cached. Peak memory: what a block returns for
    all chunks, and what it computes for one.
    """

    def __init__(
        self, model: CausalLM, samples: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.model, self.index = model, 0
        self._lenders = [m for m in model.modules() if isinstance(m, LendingAttention)]
        self.chunks = [Chunk(part, device) for part in in_chunks(samples)]
        self._chunk = self.chunks[0]
        blocks: list[Any] = [*model.model.layers]
        for index, block in enumerate(blocks):
            block.forward = partial(self._forward, index, block.forward)
            if hasattr(block, "enter"):
                block.enter = partial(self._enter, index, block.enter)

    def collect(self) -> None:
        """Compute the block for all chunks."""
        for chunk in self.chunks:
            self._compute(chunk)

    def move(self) -> None:
        """Compute the block for all chunks, and let them be at the next one."""
        for chunk in self.chunks:
            chunk.output = self._compute(chunk)
            chunk.lent = [
                {name: vars(lender)[name] for name in LENT if name in vars(lender)}
                for lender in self._lenders
            ]
        self.index += 1

    def end(self, chunk: Chunk) -> torch.Tensor:
        """The hidden states of a chunk after all blocks."""
        hidden: torch.Tensor = self._compute(chunk)[0]
        return hidden

    @torch.inference_mode()
    def _compute(self, chunk: Chunk) -> Any:
        """What the block returns for a chunk; after the last block, what the model returns."""
        self._chunk = chunk
        for lender, lent in zip(self._lenders, chunk.lent, strict=bool(chunk.lent)):
            vars(lender).update(lent)
        with attending(chunk.context, BACKEND.attention, {STATES: chunk.states}):
            try:
                return self.model(chunk.ids, chunk.positions)
            except Reached as reached:
                return reached.output

    def _enter(self, index: int, enter: Callable[..., Any], *args: Any) -> Any:
        """A block's `enter`, which needs not compute what an earlier block reads."""
        return enter(*args) if index == self.index else args

    def _forward(self, index: int, compute: Callable[..., Any], *args: Any) -> Any:
        """A block's `forward`. Blocks may change their inputs: they get copies of what is kept."""
        if index == self.index:
            raise Reached(compute(*args))
        output = self._chunk.output
        return tuple(x.clone() for x in output) if isinstance(output, tuple) else output.clone()


def in_chunks(samples: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """The samples in parts of about CHUNK tokens."""
    parts: list[list[Sequence[int]]] = [[]]
    for sample in samples:
        if parts[-1] and sum(map(len, parts[-1])) + len(sample) > CHUNK:
            parts.append([])
        parts[-1].append(sample)
    return parts


def give_states(block: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a block's mixers states of zeros, and a slot for those that are not kept."""
    for mixer in block.modules():
        if isinstance(mixer, StateMixer):
            mixer.set_states(
                torch.zeros(
                    NUM_SLOTS, *each.shape, device=device,
                    dtype=torch.float32 if each.in_float32 else dtype,
                )
                for each in mixer.cache.tensors
            )  # fmt: skip
