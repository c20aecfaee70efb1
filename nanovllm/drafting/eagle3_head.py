"""An EAGLE-3 head: one decoder layer that guesses a model's next tokens from its residuals.

To guess the token at j + 2, it reads the residuals that the model had at position j before three of
its layers, fused into one, and the embedding of the token at j + 1. For the tokens after that, it
reads its own output in place of the residuals, which the model has not computed yet.
"""

import torch
from torch import nn

from nanovllm.drafting.draft_vocabulary import DraftVocabulary
from nanovllm.drafting.eagle3_config import NUM_TAPS, HeadConfig
from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.mixer import ROPE, SelfAttention
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models import parts
from nanovllm.models.decoder import Model


class MidLayer(nn.Module):
    """The decoder layer; its attention reads the embedding and the fused residuals, both normed."""

    def __init__(self, config: HeadConfig, make: Build) -> None:
        super().__init__()
        layer = config.layer
        hidden = layer.hidden_size
        self.self_attn = SelfAttention(
            make, hidden, layer.heads(0), qkv_bias=layer.qkv_bias, o_bias=layer.o_bias,
            size_in=2 * hidden,
        )  # fmt: skip
        self.mlp = parts.mlp(layer, make)
        self.input_layernorm, self.hidden_norm = parts.norm(layer), parts.norm(layer)
        self.post_attention_layernorm = RMSNorm(hidden, layer.rms_norm_eps, make.ranks)
        self.norm_before_residual = config.norm_before_residual

    def project(self, embedded: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [T, (H + 2 * KVH) * D] of embeddings and fused residuals."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(fused)], dim=-1)
        projected: torch.Tensor = self.self_attn.qkv_proj(both)
        return projected

    def forward(
        self,
        embedded: torch.Tensor,
        fused: torch.Tensor,
        rope: Rope,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and fused residuals [T, hidden] -> the layer's output, and the residual.

        With `rows`, both have only these rows.
        """
        x = self.self_attn.attend(self.project(embedded, fused), {ROPE: rope})
        if rows is not None:
            x, fused = x.index_select(0, rows), fused.index_select(0, rows)
        residual = self.hidden_norm(fused) if self.norm_before_residual else fused
        x, residual = self.post_attention_layernorm.add(self.self_attn.o_proj(x), residual)
        return self.mlp(x), residual

    def store(
        self, embedded: torch.Tensor, fused: torch.Tensor, rope: Rope, slots: torch.Tensor
    ) -> None:
        """Store keys and values, without attention."""
        attention, attn = self.self_attn, self.self_attn.attn
        heads = self.project(embedded, fused).unflatten(-1, (-1, attention.head_dim))  # type: ignore[no-untyped-call]
        attn.kernels.norm_rope_store(heads, attn.num_kv_heads, rope, None, 0.0, attn.kv, slots)


class Eagle3Head(Model):
    """The head. The ranks split its layer and its vocabulary as they split the model's.

    A head without an embedding of its own uses the model's; one without `d2t` knows all tokens.
    """

    def __init__(
        self,
        config: HeadConfig,
        max_positions: int,
        ranks: Ranks = ALONE,
        own_embedding: bool = False,
        own_vocabulary: bool = True,
    ) -> None:
        super().__init__()
        layer, self.hidden_size = config.layer, config.layer.hidden_size
        hidden, vocab_size, size = layer.hidden_size, layer.vocab_size, config.draft_vocab_size
        self.fc = ReplicatedLinear(NUM_TAPS * config.target_hidden_size, hidden)
        make = Build(ranks, PLAIN_FORMATS, max_positions)
        self.rotary_emb = parts.rope(layer, make)
        self.midlayer = MidLayer(config, make)
        self.norm = RMSNorm(hidden, layer.rms_norm_eps, ranks)
        self.lm_head = ParallelLMHead(size, hidden, ranks)
        self.d2t = DraftVocabulary(size, vocab_size) if own_vocabulary else None
        self.embed_tokens = None
        if own_embedding:
            self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden, ranks)

    def fuse(self, residuals: list[torch.Tensor]) -> torch.Tensor:
        """The model's residuals [T, hidden] before its tapped layers, as one [T, hidden]."""
        fused: torch.Tensor = self.fc(torch.cat(residuals, dim=-1))
        return fused

    def guess(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        fused: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From fused residuals at positions [T], and the next tokens embedded, to normed outputs.

        The second result takes the place of the fused residuals at the next positions. With `rows`,
        both results have only these rows.
        """
        return self.norm.add(*self.midlayer(embedded, fused, self.rotary_emb(positions), rows))

    def store(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        fused: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the keys and values of positions, without attention."""
        self.midlayer.store(embedded, fused, self.rotary_emb(positions), slots)

    def compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] over the model's vocabulary on rank 0; a part of them on others."""
        logits: torch.Tensor = self.lm_head(normed)
        if self.d2t is None or self.lm_head.ranks.rank > 0:
            return logits
        return self.d2t.spread(logits)
