"""Decoder: an embedding, blocks and a norm. CausalLM: a decoder with its head, the whole model.

The T tokens of all sequences of a step form one dimension. A family (`models/llama.py` and others)
says what parts a model has.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from nanovllm.formats.names import USUAL_NAMES, Names
from nanovllm.layers.attention import Attention
from nanovllm.layers.backend import Backend
from nanovllm.layers.block import Block
from nanovllm.layers.context import get_context
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.mixer import Mixer, Ropes
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding


class Decoder(nn.Module):
    """Token ids and positions [T] -> hidden states [T, hidden], or only those of the tokens `rows`.

    The second result is a list of residuals [T, hidden]: those before each of the layers `taps`.
    `ropes` has the rotations of all layers, by the names that their mixers use.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        make: Build,
        embedding: VocabParallelEmbedding,
        blocks: Iterable[Block],
        norm: RMSNorm,
        ropes: Mapping[str, RotaryEmbedding],
    ) -> None:
        super().__init__()
        self.ranks = make.ranks
        self.embed_tokens = embedding
        self.ropes = nn.ModuleDict(ropes)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.few_rows: Any = None  # as a module of `layers` makes it for decode steps of few rows
        self._sum_up()

    def _sum_up(self) -> None:
        """Let the norm after each block add up the ranks' results, if the block does not."""
        layers: list[Any] = [*self.layers, None]
        for before, after in pairwise(layers):
            norm = self.norm if after is None else after.parts.before_mixer
            if before.leaves_sum:
                if norm is None:
                    raise ValueError("a norm must follow a block that has none at its end")
                norm.sum_over(self.ranks)

    def rotations(self, positions: torch.Tensor) -> Ropes:
        """Cosines and sines of a step's positions [T], once for all layers."""
        return {name: rope(positions) for name, rope in self.ropes.items()}

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:  # noqa: ARG002
        """The first block's input [T, hidden]. Decoders with learned positions add them here."""
        return self.embed_tokens(input_ids)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Let `forward` return the residuals before these layers."""
        self.taps = layers

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x: torch.Tensor = self.embed(input_ids, positions)
        residual: torch.Tensor | None = None
        ropes = self.rotations(positions)
        layers, few_rows = [*self.layers], self.few_rows
        if few_rows and len(x) <= few_rows.most_rows and not get_context().is_prefill:
            assert rows is None
            compute: Any = import_module(few_rows.form).compute_few_rows
            if computed := compute(few_rows, layers, x, ropes, self.norm, self.taps):
                return computed  # type: ignore[no-any-return]
        tapped = {}
        for index, layer in enumerate(layers):
            x, residual = layer.enter(x, residual)
            if index in self.taps:
                tapped[index] = residual
            x, residual = layer(x, residual, ropes, rows if layer is layers[-1] else None)
        assert residual is not None
        hidden = self.norm.add(x, residual)[0] if len(x) else x
        return hidden, [tapped[index] for index in self.taps]


class Model(nn.Module):
    """A model that a checkpoint fills.

    `names` says what checkpoints call its tensors. `tied_weights` maps a second name of a tensor to
    its first name: a checkpoint has either name, or both with the same values.
    """

    lm_head: ParallelLMHead

    names: Names = USUAL_NAMES
    tied_weights: Mapping[str, str] = {}

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each decoder layer, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each decoder layer, in order."""
        return [module for module in self.modules() if isinstance(module, Mixer)]

    @property
    def num_bytes(self) -> int:
        """The memory of the layers' tensors, before their layouts are changed.

        It includes the quantized copy that a head makes of the embedding's table.
        """
        layers = [layer for layer in self.modules() if isinstance(layer, Layer)]
        tensors = {t for layer in layers for t in (*layer.parameters(False), *layer.buffers(False))}
        total, head = sum(t.nbytes for t in tensors if not t.is_meta), self.lm_head
        scheme, part = head.weight_format.scheme, head.rank_part
        if scheme is None or not head.is_tied:
            return total
        return total + scheme.num_bytes(part.num_rows * part.in_features, part.in_features)

    def bind(self, backend: Backend) -> None:
        """Set the kernels of all layers."""
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                try:
                    module.bind(backend)
                except ValueError as error:
                    parts = ", ".join(self.names.parts(name.rpartition(".")[2]))
                    raise ValueError(f"{name}{parts and f' ({parts})'}: {error}") from None


class CausalLM(Model):
    """The decoder with its head.

    The ranks split every layer. They split each expert, or each rank has `whole_experts`.
    """

    def __init__(self, make: Build, decoder: Decoder, head: ParallelLMHead) -> None:
        super().__init__()
        self.make, self.model, self.lm_head = make, decoder, head
        self.names = make.formats.names
        if head.is_tied:
            self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"}

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, hidden] of a step's tokens, or only of the tokens `rows`.

        The second result has the residuals of all tokens before the layers `model.taps`.
        """
        states: tuple[torch.Tensor, list[torch.Tensor]] = self.model(input_ids, positions, rows)
        return states

    def bind(self, backend: Backend, few_rows: bool = False) -> None:
        """Set the kernels of all layers. `few_rows` allows those of graphs of few rows."""
        super().bind(backend)
        if name := "few_rows" if few_rows else backend.attention.few_rows:
            form = import_module(f"nanovllm.layers.{name}")
            self.model.few_rows = form.few_rows_of(self, backend.kernels)

    def compute_logits(
        self,
        hidden: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [T, vocab] of the rows that sample, written to `out` if given."""
        logits: torch.Tensor = self.lm_head(hidden, out)
        return logits
