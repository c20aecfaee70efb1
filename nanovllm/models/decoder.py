"""The decoder that all architectures share; flags in `ModelConfig` select what differs.

The T tokens of a step form one dimension, across all its sequences.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nanovllm.kernels.plain.few_rows import ExpertWeights, Scaled
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.quantized import Rounding
from nanovllm.kernels.table import Kernels
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention.layer import Attention
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import adapter_rows, get_context, keep_adapters_of
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.layer import Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.lora import AdapterRows
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.layers.router import Router
from nanovllm.models.adapted import with_adapters
from nanovllm.models.config import ExpertsConfig, ModelConfig
from nanovllm.models.formats import PLAIN_FORMATS, Formats
from nanovllm.models.quantization.rules import HEAD
from nanovllm.models.registry import FUSED

if TYPE_CHECKING:
    from nanovllm.kernels.triton.few_rows import FewRows  # which needs Triton


class SelfAttention(nn.Module):
    """Grouped-query attention, in some models with a norm on each query and key head."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        rotated: bool,
        ranks: Ranks,
        formats: Formats,
        width: int = 1,  # hidden states that are its input, one after the other
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        self.qkv_proj = QKVParallelLinear(
            width * config.hidden_size, config.head_dim, config.num_attention_heads,
            config.num_key_value_heads, bias=config.qkv_bias, ranks=ranks,
            weight_format=formats.of("qkv_proj"),
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            q_size, config.hidden_size, config.o_bias, ranks, formats.of("o_proj")
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.rotated = rotated
        self.attn = Attention(
            self.qkv_proj.num_kv_heads, config.head_dim, window, formats.has_kv_scales()
        )

    def attend(self, projected: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Attend between the two projections: [T, (H + 2 * KVH) * D] -> [T, H * D]."""
        qkv = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        attended: torch.Tensor = self.attn(qkv, rope if self.rotated else None, norms)
        return attended.flatten(1)


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: ModelConfig, ranks: Ranks, formats: Formats) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias, ranks, formats.of("gate_up_proj")
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias, ranks, formats.of("down_proj"))
        self.act_fn = SiluAndMul()

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        """How it rounds as many rows as x has: `forward` takes those, too."""
        return self.gate_up_proj.rounding(x)

    def forward(self, x: Any) -> torch.Tensor:
        gate_up, down_proj = self.gate_up_proj(x), self.down_proj
        out: torch.Tensor = down_proj(self.act_fn(gate_up, down_proj.rounding(gate_up)))
        return out

    @property
    def operands(self) -> list[Any]:
        """What the kernels for few rows read."""
        return [linear.operand_and_bias[0] for linear in (self.gate_up_proj, self.down_proj)]

    def add_few(
        self, few_rows: "FewRows", scaled: Scaled, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, Scaled]:
        """The residual plus the layer, for few rows, and the sum scaled for the next norm."""
        gated = few_rows.gated(scaled, *self.gate_up_proj.operand_and_bias)
        return _add_few(few_rows, gated, self.down_proj, residual, norm)


class SparseMLP(nn.Module):
    """Experts, and the router that selects some of them for each token, with a share for each."""

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        ranks: Ranks,
        whole_experts: bool,
        formats: Formats,
    ) -> None:
        super().__init__()
        self.gate = Router(
            hidden_size, config.num_experts, config.per_token, config.norm_topk_prob,
            formats.in_float32("gate"),
        )  # fmt: skip
        self.experts = Experts(
            config.num_experts, hidden_size, config.intermediate_size, ranks, whole_experts,
            formats.of_experts(config.num_experts),
        )  # fmt: skip

    def rounding(self, x: torch.Tensor) -> None:
        """The router's rows are not rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, expert_ids = self.gate.select(x)
        out: torch.Tensor = self.experts(x, expert_ids, shares)
        return out

    @property
    def operands(self) -> list[Any]:
        """What the kernels for few rows read. They do not sum experts over several ranks."""
        gate, stacks = self.gate, self.experts.operands
        if self.experts.ranks.size > 1:
            return [None]
        return [stacks and ExpertWeights(gate.kernel, *stacks, gate.per_token, gate.normalized)]

    def add_few(
        self, few_rows: "FewRows", scaled: Scaled, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, Scaled]:
        """The residual plus the layer, for few rows, and the sum scaled for the next norm."""
        (weights,) = self.operands
        return few_rows.add_experts(scaled, weights, residual, norm.weight, norm.eps)


class DecoderLayer(nn.Module):
    """Norm, attend, add; norm, feed forward, add. An add is done by the norm that follows it.

    With several ranks, that norm adds up what they return.
    """

    def __init__(
        self, config: ModelConfig, index: int, ranks: Ranks, whole_experts: bool, formats: Formats
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
            config, config.sliding_windows[index], config.rotated_layers[index], ranks,
            formats.inside("self_attn"),
        )  # fmt: skip
        formats = formats.inside("mlp")
        self.mlp: MLP | SparseMLP
        if config.experts and index in config.experts.layers:
            self.mlp = SparseMLP(config.hidden_size, config.experts, ranks, whole_experts, formats)
        else:
            self.mlp = MLP(config, ranks, formats)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ranks)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ranks)

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """The first norm of the residual plus x, and that sum, which is the layer's residual."""
        rounding = self.self_attn.qkv_proj.rounding(x)
        if residual is None:
            return self.input_layernorm(x, rounding), x
        return self.input_layernorm.add(x, residual, rounding)

    def forward(
        self, x: Any, residual: torch.Tensor, rope: Rope, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From what `enter` returns to the next layer's inputs; KV of all tokens is stored.

        With `rows`, the rest of the layer is computed only for those.
        """
        attention, mlp = self.self_attn, self.mlp
        x = attention.attend(attention.qkv_proj(x), rope)
        if rows is not None:
            # Indexing by a tensor starts PyTorch's threads for a few rows, which takes milliseconds
            # where other processes compute.
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            if not len(rows):  # no sequence samples: their prompts end in later steps
                return residual, residual
            keep_adapters_of(rows)
        x = attention.o_proj(x)
        x, residual = self.post_attention_layernorm.add(x, residual, mlp.rounding(x))
        return mlp(x), residual

    @property
    def operands(self) -> list[Any]:
        """What the kernels for few rows read, in the order of their use."""
        linears = self.self_attn.qkv_proj, self.self_attn.o_proj
        return [*(linear.operand_and_bias[0] for linear in linears), *self.mlp.operands]

    def forward_few(
        self, few_rows: "FewRows", x: torch.Tensor, scaled: Scaled | None, rope: Rope, norm: RMSNorm
    ) -> tuple[torch.Tensor, Scaled]:
        """As `forward`, in fewer kernels: six instead of nine, or eight with experts.

        With several ranks it takes eight, as two of them sum over the ranks.

        x is the residual. `scaled` is x scaled for this layer's first norm, None in the first
        layer. `norm` is the norm that follows this layer.
        """
        qkv, o = self.self_attn.qkv_proj, self.self_attn.o_proj
        if scaled is None:
            projected = qkv(self.input_layernorm(x))
        else:
            projected = few_rows.linear(scaled, *qkv.operand_and_bias)
        attended = self.self_attn.attend(projected, rope)
        x, scaled = _add_few(few_rows, attended, o, x, self.post_attention_layernorm)
        return self.mlp.add_few(few_rows, scaled, x, norm)


def _add_few(
    few_rows: "FewRows",
    x: torch.Tensor,
    linear: RowParallelLinear,
    residual: torch.Tensor,
    norm: RMSNorm,
) -> tuple[torch.Tensor, Scaled]:
    """The residual and all ranks' outputs of `linear`, added up, and that scaled for `norm`."""
    if norm.ranks.size == 1:
        return few_rows.add(x, *linear.operand_and_bias, residual, norm.weight, norm.eps)
    assert norm.ranks.peer_kernels is not None
    part = few_rows.product(x, *linear.operand_and_bias)
    return norm.ranks.peer_kernels.add_scaled(part, residual, norm.weight, norm.eps)


class Decoder(nn.Module):
    """The decoder: token ids and positions [T] -> hidden states [T, hidden], or those of `rows`.

    The second result are the residuals [T, hidden] before the layers `taps`, in that order.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        ranks: Ranks,
        whole_experts: bool,
        formats: Formats,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ranks)
        self.rotary_emb = get_rope(
            config.head_dim, max_positions, config.max_position_embeddings, config.rope_parameters
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, ranks, whole_experts, formats.inside(f"layers.{index}"))
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ranks)
        self.few_rows: FewRows | None = None

    def bind_few_rows(self, kernels: Kernels) -> None:
        """Use the kernels for decode steps of few rows, if this device has faster ones.

        Layers may be quantized differently: all need such kernels, and the lowest limit applies.
        """
        layers: list[Any] = list(self.layers)
        dtype = self.norm.weight.dtype
        found = [kernels.few_rows(layer.operands, dtype) for layer in layers]
        if all(found):
            self.few_rows = min(found, key=lambda each: each.most_rows if each else 0)

    def agree_on_few_rows(self) -> None:
        """Take the lowest limit of all ranks, which have connected, if they sum by such kernels."""
        ranks, few_rows = self.ranks, self.few_rows
        if ranks.size > 1:
            most = ranks.peer_kernels.most_rows(self.norm.weight[None]) if ranks.peer_kernels else 0
            most = ranks.minimum(min(most, few_rows.most_rows) if few_rows else 0)
            self.few_rows = replace(few_rows, most_rows=most) if few_rows and most else None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        rope = self.rotary_emb(positions)
        few_rows = self.few_rows
        if few_rows and len(x) <= few_rows.most_rows and not get_context().is_prefill:
            assert rows is None
            if adapters := adapter_rows():
                few_rows = None if self.taps else with_adapters(few_rows, self.layers, adapters)
            if few_rows:
                return self._forward_few(few_rows, x, rope)
        layers: list[Any] = list(self.layers)
        tapped = {}
        for index, layer in enumerate(layers):
            x, residual = layer.enter(x, residual)
            if index in self.taps:
                tapped[index] = residual
            x, residual = layer(x, residual, rope, rows if layer is layers[-1] else None)
        assert residual is not None
        hidden = self.norm.add(x, residual)[0] if len(x) else x
        return hidden, [tapped[index] for index in self.taps]

    def _forward_few(
        self, few_rows: "FewRows", x: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        layers: list[Any] = list(self.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        scaled: Scaled | None = None
        tapped = {}
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            if index in self.taps:
                tapped[index] = x
            x, scaled = layer.forward_few(few_rows, x, scaled, rope, norm)
        hidden: torch.Tensor = self.norm(x)  # one kernel for all rows; the last `scaled` is unused
        return hidden, [tapped[index] for index in self.taps]


class Model(nn.Module):
    """What a checkpoint fills.

    `packed_modules_mapping` maps a checkpoint's module to a fused one and its index there.
    `tied_weights` has other names of tensors; a checkpoint has one of the two, or both with the
    same values.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, int]]] = FUSED
    tied_weights: Mapping[str, str] = {}

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each decoder layer, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def bind(self, backend: Backend) -> None:
        """Set the kernels of all layers."""
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                try:
                    module.bind(backend)
                except ValueError as error:
                    parts = ", ".join(p for p, (fused, _) in FUSED.items() if name.endswith(fused))
                    raise ValueError(f"{name}{parts and f' ({parts})'}: {error}") from None


class CausalLM(Model):
    """The decoder with its head.

    The ranks split every layer; of experts, they split each one or hold `whole_experts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        ranks: Ranks = ALONE,
        whole_experts: bool = False,
        formats: Formats = PLAIN_FORMATS,
    ) -> None:
        super().__init__()
        self.whole_experts, self.formats = whole_experts, formats
        self.model = Decoder(config, max_positions, ranks, whole_experts, formats.inside("model"))
        of_head = formats.of(HEAD)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, ranks, of_head)
        # A head that is stored quantized is not the embedding's table, whatever the config says.
        if config.tie_word_embeddings and of_head.is_plain:
            self.lm_head.tie(self.model.embed_tokens)
            self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"}

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, hidden] of a step's tokens, or only of the tokens `rows`.

        And the residuals of all tokens that `model.taps` asks for.
        """
        states: tuple[torch.Tensor, list[torch.Tensor]] = self.model(input_ids, positions, rows)
        return states

    def bind(self, backend: Backend, few_rows: bool = False) -> None:
        """Set the kernels of all layers. `few_rows` allows those for decode steps of few rows."""
        super().bind(backend)
        if few_rows:
            self.model.bind_few_rows(backend.kernels)

    def compute_logits(
        self,
        hidden: torch.Tensor,
        out: torch.Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Logits [T, vocab] of the rows that sample, written to `out` if given.

        `adapters` are those of these rows, if the head may have some.
        """
        logits: torch.Tensor = self.lm_head(hidden, out, adapters)
        return logits
