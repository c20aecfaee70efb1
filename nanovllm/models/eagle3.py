"""An EAGLE-3 head: one decoder layer that guesses a model's next tokens from its residuals.

For the token after position j it reads the residuals that the model had at position j before three
of its layers, fused into one, and the embedding of the token at j + 1. For the tokens after that
one its own output stands for the residuals that the model has not computed yet.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.layers.backend import Backend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layer import Layer, Loaded
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.decoder import MLP, Model, SelfAttention
from nanovllm.models.eagle3_config import NUM_TAPS, HeadConfig
from nanovllm.models.formats import PLAIN_FORMATS
from nanovllm.models.hub import MODEL_PATTERNS
from nanovllm.models.loader import InFile, load_dummy, load_model, read_weights

PICKLED = "pytorch_model.bin"
HEAD_PATTERNS = (*MODEL_PATTERNS, PICKLED)
EMBEDDING, VOCABULARY = "embed_tokens.weight", "d2t.offsets"
LAYER, OTHER_LAYER = "midlayer.", "layers.0."  # the second one in files of the speculators library
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64",
}  # fmt: skip


class Vocabulary(Layer):
    """The tokens of the model that the head knows: token i of the head is i + offsets[i]."""

    def __init__(self, size: int, model_size: int) -> None:
        super().__init__()
        self.model_size = model_size
        offsets = torch.zeros(size, dtype=torch.long)
        self.offsets = nn.Parameter(offsets, requires_grad=False)

    @property
    def token_ids(self) -> torch.Tensor:
        """The model's ids of the head's tokens."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the offsets. Each must lead to another token of the model."""
        super().weight_loader(param, loaded, shard_id)
        ids = self.token_ids
        if ids.min() < 0 or ids.max() >= self.model_size or len(set(ids.tolist())) < len(ids):
            raise ValueError(f"offsets to ids that are not distinct and in [0, {self.model_size})")

    def bind(self, backend: Backend) -> None:  # noqa: ARG002
        """Keep the ids, which every guess reads."""
        self.register_buffer("ids", self.token_ids)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [T, head's] -> [T, model's]; -inf for tokens that the head does not know."""
        whole = logits.new_full((len(logits), self.model_size), -torch.inf)
        return whole.index_copy_(1, self.get_buffer("ids"), logits)


class MidLayer(nn.Module):
    """The decoder layer: its attention reads the embedding and the fused residuals, both normed."""

    def __init__(self, config: HeadConfig, ranks: Ranks) -> None:
        super().__init__()
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.self_attn = SelfAttention(layer, None, True, ranks, PLAIN_FORMATS, width=2)
        self.mlp = MLP(layer, ranks, PLAIN_FORMATS)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps, ranks)
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
        """Embeddings and fused residuals [T, hidden] -> what to add to the residual, and that.

        With `rows`, only of those.
        """
        x = self.self_attn.attend(self.project(embedded, fused), rope)
        if rows is not None:
            x, fused = x.index_select(0, rows), fused.index_select(0, rows)
        residual = self.hidden_norm(fused) if self.norm_before_residual else fused
        x, residual = self.post_attention_layernorm.add(self.self_attn.o_proj(x), residual)
        return self.mlp(x), residual

    def store(
        self, embedded: torch.Tensor, fused: torch.Tensor, rope: Rope, slots: torch.Tensor
    ) -> None:
        """Store keys and values, of which attention is not needed."""
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
        layer = config.layer
        hidden, vocab_size, size = layer.hidden_size, layer.vocab_size, config.draft_vocab_size
        self.fc = ReplicatedLinear(NUM_TAPS * config.target_hidden_size, hidden)
        self.rotary_emb = get_rope(
            layer.head_dim, max_positions, layer.max_position_embeddings, layer.rope_parameters
        )
        self.midlayer = MidLayer(config, ranks)
        self.norm = RMSNorm(hidden, layer.rms_norm_eps, ranks)
        self.lm_head = ParallelLMHead(size, hidden, ranks)
        self.d2t = Vocabulary(size, vocab_size) if own_vocabulary else None
        self.embed_tokens = None
        if own_embedding:
            self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden, ranks)

    def fuse(self, residuals: list[torch.Tensor]) -> torch.Tensor:
        """The model's residuals [T, hidden] before its tapped layers, as one [T, hidden]."""
        fused: torch.Tensor = self.fc(torch.cat(residuals, dim=-1))
        return fused

    def forward(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        fused: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For fused residuals at positions [T], and the next tokens embedded: what gives logits.

        The second result stands for the fused residuals at the next positions. With `rows`, both
        are only of those.
        """
        return self.norm.add(*self.midlayer(embedded, fused, self.rotary_emb(positions), rows))

    def store(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        fused: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the keys and values of positions that nothing is guessed after."""
        self.midlayer.store(embedded, fused, self.rotary_emb(positions), slots)

    def compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] over the model's vocabulary. On rank 0; a part of them on others."""
        logits: torch.Tensor = self.lm_head(normed)
        if self.d2t is None or self.lm_head.ranks.rank > 0:
            return logits
        return self.d2t.spread(logits)


class Pickled:
    """A tensor of a `.bin` file, with the methods of a slice of a safetensors file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return TYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def read_head(path: Path) -> Iterator[dict[str, InFile]]:
    """The tensors of a head's files, by their names here. `t2d` says what `d2t` says."""
    for tensors in _files(path):
        yield {_own_name(name): tensor for name, tensor in tensors.items() if name != "t2d"}


def _files(path: Path) -> Iterator[dict[str, InFile]]:
    """The tensors of each file, by their names there."""
    is_pickled = (path / PICKLED).exists() and not list(path.glob("*.safetensors"))
    return _unpickled(path / PICKLED) if is_pickled else read_weights(path)


def _own_name(name: str) -> str:
    if name.startswith(OTHER_LAYER):
        return name.replace(OTHER_LAYER, LAYER, 1)
    return VOCABULARY if name == "d2t" else name


@contextlib.contextmanager
def _errors_name_as_files(path: Path) -> Iterator[None]:
    """A block whose errors have the names that tensors have in the files, and not those here."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace(VOCABULARY, "d2t")
        if any(name.startswith(OTHER_LAYER) for tensors in _files(path) for name in tensors):
            text = text.replace(LAYER, OTHER_LAYER)
        raise ValueError(text) from None


def _unpickled(file: Path) -> Iterator[dict[str, InFile]]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        yield {name: InFile(Pickled(tensor)) for name, tensor in tensors.items()}
    except Exception as error:  # of any type, for a damaged file
        raise OSError(f"{file} is damaged or holds other than tensors: {error}") from error


def load_head(
    path: Path, config: HeadConfig, max_positions: int, ranks: Ranks = ALONE
) -> Eagle3Head:
    """The head with its weights, in PyTorch's default type, on its default device."""
    names = {name for tensors in read_head(path) for name in tensors}
    knows_all = config.draft_vocab_size == config.layer.vocab_size and VOCABULARY not in names
    head = Eagle3Head(config, max_positions, ranks, EMBEDDING in names, not knows_all)
    with torch.no_grad(), _errors_name_as_files(path):
        load_model(head, path, files=read_head(path))
    if EMBEDDING not in names and config.needs_embedding:
        raise ValueError(f"{path}: the files lack {EMBEDDING}, and the model's has another size")
    return head.eval()


def random_head(
    config: HeadConfig, max_positions: int, ranks: Ranks = ALONE, seed: int = 0
) -> Eagle3Head:
    """The head with random weights, in PyTorch's default type, on its default device."""
    head = Eagle3Head(config, max_positions, ranks, config.needs_embedding)
    with torch.device("meta"):
        whole = Eagle3Head(config, max_positions, own_embedding=config.needs_embedding)
    with torch.no_grad():
        load_dummy(head, whole, seed)
    return head.eval()
