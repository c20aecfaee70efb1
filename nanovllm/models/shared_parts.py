"""The parts of models whose config is a `SharedConfig`: attention, ropes, the whole model."""

from collections.abc import Callable
from dataclasses import replace

from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.per_layer_embedding import PerLayerBlock
from nanovllm.layers.proportional_rope import proportional_rope
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.layers.shared_cache import SharedKeysAndValues
from nanovllm.layers.shared_kv import LendingAttention, SharedKVAttention
from nanovllm.layers.value_norm import KeysAsValues, ValueNormAttention
from nanovllm.models import parts
from nanovllm.models.decoder import CausalLM
from nanovllm.models.per_layer_decoder import PerLayerDecoder
from nanovllm.models.shared_layers import SharedConfig, unused_names

MakeBlock = Callable[[int, Build], PerLayerBlock]


class SharedAttentions:
    """Makes the attention of each layer, in order, with factor 1 for the scores."""

    def __init__(self, config: SharedConfig) -> None:
        self.config = config
        self._lenders: dict[int, LendingAttention] = {}

    def make(self, index: int, make: Build, keys_are_values: bool = False) -> Mixer:
        """The attention of layer `index`, with the keys of another layer if the config says so."""
        config, heads = self.config, self.config.heads(index)
        hidden, rope, bias = config.hidden_size, config.layer_types[index], config.qkv_bias
        lender = config.lenders[index]
        if lender is not None:
            assert isinstance(heads, SharedKeysAndValues)
            return SharedKVAttention(
                make, hidden, heads, self._lenders[lender],
                rope=rope, q_norm=self._norm(index), bias=bias,
            )  # fmt: skip
        kind = KeysAsValues if keys_are_values else ValueNormAttention
        attention = kind(
            make, hidden, heads, head_norms=(self._norm(index), self._norm(index)), rope=rope,
            scale=1.0, bias=bias, lends=config.lends(index),
        )  # fmt: skip
        if isinstance(attention.attn, LendingAttention):
            self._lenders[index] = attention.attn
        return attention

    def _norm(self, index: int) -> RMSNorm:
        return RMSNorm(self.config.own_heads(index).head_dim, self.config.rms_norm_eps)


def ropes(config: SharedConfig, make: Build) -> dict[str, RotaryEmbedding]:
    """The ropes by types of layers."""
    made = {}
    for kind, parameters in config.ropes.items():
        head_dim = config.own_heads(config.layer_types.index(kind)).head_dim
        if parameters["rope_type"] == "proportional":
            made[kind] = proportional_rope(head_dim, make.max_positions, parameters)
        else:
            limits = make.max_positions, config.max_position_embeddings
            made[kind] = get_rope(head_dim, *limits, parameters)
    return made


def shared_model(
    config: SharedConfig, make: Build, block: MakeBlock,
    make_decoder: Callable[..., PerLayerDecoder] = PerLayerDecoder,
) -> CausalLM:  # fmt: skip
    """The model of these blocks.

    Files may also have the keys and values of layers that do not use them: these are skipped.
    """
    hidden = config.hidden_size
    embedding = VocabParallelEmbedding(config.vocab_size, hidden, make.ranks, scale=hidden**0.5)
    inside = make.inside("model")
    blocks = [block(i, inside.inside(f"layers.{i}")) for i in range(config.num_hidden_layers)]
    norm = parts.norm(config)
    decoder = make_decoder(make, embedding, blocks, norm, ropes(config, make), config.per_layer)
    head = parts.head(config, make, embedding, soft_cap=config.soft_cap)
    model = CausalLM(make, decoder, head)
    unused = unused_names(config.lenders, model.names)
    model.names = replace(model.names, skipped=(*model.names.skipped, *unused))
    return model
