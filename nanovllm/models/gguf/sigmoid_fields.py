"""The fields of MiniMax-M2, Trinity and MiMo-V2: experts chosen by sigmoids, with biases."""

from collections.abc import Callable

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.reader import Array
from nanovllm.models.gguf.usual_fields import Config, attention_bias, window
from nanovllm.models.sparse_kinds import DENSE, SPARSE
from nanovllm.models.windows import FULL, SLIDING

SIGMOID = 2  # a gating function
VALUE_SCALE = 0.707  # of MiMo-V2-Flash: old files leave it out
EVERY = 4  # Trinity's layers without a window; files do not say it


def _minimax_m2(metadata: Metadata) -> Config:
    """The shares of a token's experts add up to 1: files do not say it."""
    inner = metadata.size("expert_feed_forward_length")
    for key, allowed in (
        ("expert_gating_func", (SIGMOID,)), ("expert_weights_norm", (True,)),
        ("expert_weights_scale", (0.0, 1.0)), ("leading_dense_block_count", (0,)),
        ("feed_forward_length", (inner,)), ("expert_shared_count", (0,)),
        ("expert_group_count", (0, 1)), ("expert_group_used_count", (0, 1)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return {
        "intermediate_size": inner, "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"), **attention_bias(metadata),
    }  # fmt: skip


def _afmoe(metadata: Metadata) -> Config:
    """Embeddings are multiplied by the root of the hidden size: files do not say it."""
    inner, shared = (
        metadata.size("expert_feed_forward_length"),
        metadata.size("expert_shared_count"),
    )
    for key, allowed in (
        ("expert_gating_func", (SIGMOID,)), ("expert_weights_norm", (True,)),
        ("expert_shared_feed_forward_length", (inner * shared,)),
        ("expert_group_count", (0, 1)), ("expert_group_used_count", (0, 1)),
        ("attention.sliding_window_pattern", (EVERY,)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return {
        "moe_intermediate_size": inner, "num_shared_experts": shared,
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "route_scale": metadata.number("expert_weights_scale", 1.0),
        "sliding_window": window(metadata), "global_attn_every_n_layers": EVERY,
        "mup_enabled": True, **attention_bias(metadata),
    }  # fmt: skip


def _mimo2(metadata: Metadata) -> Config:
    """The layers with a router have experts. The shares add up to 1: files do not say it."""
    for key, allowed in (
        ("expert_gating_func", (SIGMOID,)), ("expert_weights_norm", (True,)),
        ("expert_weights_scale", (0.0, 1.0)), ("expert_shared_count", (0,)),
        ("expert_group_count", (0, 1)), ("expert_group_used_count", (0, 1)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    count, tensors = metadata.num_layers, metadata.model.tensors
    windowed = _windowed(metadata)[:count]
    kv_heads = metadata.of_each("attention.head_count_kv")[:count]
    full, sliding = (
        _same(metadata, [n for n, has in zip(kv_heads, windowed, strict=True) if has == kind])
        for kind in (False, True)
    )
    routed = (f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(count))
    return {
        "num_key_value_heads": full or sliding, "swa_num_key_value_heads": sliding or full,
        "v_head_dim": metadata.size("attention.value_length"),
        "attention_value_scale": metadata.number("attention.value_scale", VALUE_SCALE),
        "sliding_window": window(metadata),
        "layer_types": [SLIDING if has else FULL for has in windowed],
        "swa_rope_theta": metadata.number("rope.freq_base_swa"),
        "mlp_layer_types": [SPARSE if has else DENSE for has in routed],
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_routed_experts": metadata.size("expert_count"), "norm_topk_prob": True,
        "num_experts_per_tok": metadata.size("expert_used_count"), **attention_bias(metadata),
    }  # fmt: skip


def _windowed(metadata: Metadata) -> list[bool]:
    """Which layers have a window: a number, or true or false, for each."""
    key = "attention.sliding_window_pattern"
    value = metadata.model.metadata.get(f"{metadata.architecture}.{key}")
    metadata.ignore(key)
    flags = [*value.values()] if isinstance(value, Array) else []
    if len(flags) != metadata.size("block_count") or not {*flags} <= {0, 1}:
        raise metadata.wrong(key, value, f"{metadata.size('block_count')} times 0 or 1")
    return [bool(flag) for flag in flags]


def _same(metadata: Metadata, numbers: list[int]) -> int:
    """The number of key heads of all layers of one kind; 0 without layers."""
    if len({*numbers}) > 1:
        key = "attention.head_count_kv"
        raise metadata.wrong(key, numbers, "equal in all layers with, or without, a window")
    return numbers[0] if numbers else 0


SIGMOIDS: dict[str, Callable[[Metadata], Config]] = {
    "minimax-m2": _minimax_m2, "afmoe": _afmoe, "mimo2": _mimo2,
}  # fmt: skip
