"""MtpHead: the draft head that a checkpoint carries, in tensors `mtp.*` or in one more layer.

To guess the token at j + 2, it joins the embedding of the token at j + 1 and the model's output at
position j, each normed, to one vector, and computes it by a decoder layer of the model's kind with
full attention, and a norm. The model's own projection makes logits of the result, which also takes
the place of the model's output at the next position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from nanovllm.formats.names import Names
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.layers.backend import AttentionBackend, Backend
from nanovllm.layers.block import Block
from nanovllm.layers.context import Context, attending
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.carried_head import CarriedHead
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM, Decoder, Model
from nanovllm.models.family import family_of
from nanovllm.models.later_layers import PREFIX, LaterLayersConfig, copies, head_prefixes
from nanovllm.models.parts import made_with

FEW_TOKENS = 256  # of a model that is made for its layer alone


@dataclass(frozen=True)
class MtpNames(Names):
    """The names of a head in the files of its model, which begin with `own`.

    All others are skipped.
    """

    own: str = PREFIX

    @classmethod
    def of(cls, config: ModelConfig) -> "MtpNames":
        """With the layers of the model's family."""
        names, own = family_of(config.architecture, config.family).names, PREFIX
        prefixes: Mapping[str, str] = {PREFIX: "model."}
        skipped: tuple[str, ...] = ()
        if isinstance(config, LaterLayersConfig) and config.later:
            own = config.later[0]
            prefixes, skipped = head_prefixes(own, "model."), copies(own)
        return cls(
            names.fused, names.experts, prefixes, names.pieces, skipped, names.stores_fused, own
        )

    def is_skipped(self, name: str) -> bool:
        return not name.startswith(self.own) or super().is_skipped(name)


def one_layer(config: ModelConfig) -> ModelConfig:
    """The config of a model that has only the head's layer, and few tokens."""
    family = family_of(config.architecture, config.family)
    assert family.draft_layer is not None
    like: ModelConfig = family.draft_layer(config)
    vocab_size = min(config.vocab_size, FEW_TOKENS)
    return replace(
        like, num_hidden_layers=1, sliding_windows=(None,), rotated_layers=(True,),
        vocab_size=vocab_size,
    )  # fmt: skip


class DecodesOnly(AttentionBackend):
    """Attention for a head: in prefills, which only store keys and values, it computes nothing."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVLayer, context: Context
    ) -> torch.Tensor:
        """The queries, in place of a result that nothing reads; of latent rows, as many columns."""
        del k, v, context
        return q[..., : kv.value_width]

    def decode(self, q: torch.Tensor, kv: KVLayer, context: Context) -> torch.Tensor:
        return self._backend.decode(q, kv, context)


class MtpDecoder(Decoder):
    """The head's layer, and norms of the same kind. Its input are the vectors that `join` makes.

    It takes the layer and the last norm of a decoder that is made `like` the head's.
    """

    def __init__(
        self, make: Build, like: Decoder, hidden_size: int, ropes: Mapping[str, RotaryEmbedding]
    ) -> None:
        super().__init__(make, cast(Any, None), cast(Any, like.layers), like.norm, ropes)
        stored = make.formats.inside("model").of("fc")
        self.fc = ReplicatedLinear(2 * hidden_size, hidden_size, weight_format=stored)
        kind, eps = type(like.norm), like.norm.eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            kind(hidden_size, eps) for _ in range(2)
        )

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Embeddings and states [T, hidden], as one [T, hidden]."""
        normed = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        joined: torch.Tensor = self.fc(torch.cat(normed, dim=-1))
        return joined

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The joined vectors, which `input_ids` are here."""
        return input_ids


class MtpHead(CarriedHead):
    """The head. Embedding and logits are the model's; the ranks split the layer as the model's."""

    embed_tokens: VocabParallelEmbedding | None = None
    prefix = PREFIX

    def __init__(self, config: ModelConfig, model: CausalLM, make: Build) -> None:
        Model.__init__(self)
        like, ropes = made_with(one_layer(config), make).model, cast(Any, model.model.ropes)
        self.hidden_size = config.hidden_size
        self.model = MtpDecoder(make, like, config.hidden_size, ropes)
        self.make, self.names = make, make.formats.names
        self.own = MtpNames.of(config).own
        self._made_of = config, model

    def blank(self, ranks: Ranks) -> "MtpHead":
        """The head for other ranks, before loading."""
        return MtpHead(*self._made_of, replace(self.make, ranks=ranks))

    @property
    def decoder(self) -> MtpDecoder:
        """The layer and norms."""
        assert isinstance(self.model, MtpDecoder)
        return self.model

    @property
    def num_bytes(self) -> int:
        """The memory of the head's own tensors."""
        return sum(param.nbytes for param in self.parameters() if not param.is_meta)

    def bind(self, backend: Backend, few_rows: bool = False) -> None:  # noqa: ARG002
        """Set the kernels of all layers."""
        Model.bind(self, backend)
        for layer in self.attentions:
            layer.attention_backend = DecodesOnly(layer.attention_backend)

    def fuse(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """The model's output, which is all that was taken."""
        (output,) = taken
        return output

    def guess(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed outputs of states at positions [T] and the next tokens embedded, twice."""
        joined = self.decoder.join(embedded, states)
        normed: torch.Tensor = self.decoder(joined, positions, rows)[0]
        return normed, normed

    def store(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the keys and values of positions, without attention."""
        (block,) = self.decoder.layers
        assert isinstance(block, Block)
        x, _ = block.enter(self.decoder.join(embedded, states), None)
        with attending([Context(True, slots)], []):
            block.parts.mixer.mix(x, self.decoder.rotations(positions))

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The model's logits."""
        return self._made_of[1].compute_logits(hidden, out)
