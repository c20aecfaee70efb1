"""The fields of a `config.json`, as transformers spells them, from a GGUF file's metadata.

Each family lists what its files say and what their converter assumes. A key that changes the
computation and that nothing here reads is an error.
"""

from collections.abc import Callable

from nanovllm.formats.names import HEAD as USUAL_HEAD
from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.models.gguf.dense_fields import DENSE
from nanovllm.models.gguf.file import TensorInfo
from nanovllm.models.gguf.gemma_fields import GEMMA
from nanovllm.models.gguf.hybrid_fields import HYBRIDS
from nanovllm.models.gguf.hybrid_names import KEYS_OF_LATENTS, VALUES_OF_LATENTS
from nanovllm.models.gguf.latent_fields import LATENT, latent_heads
from nanovllm.models.gguf.metadata import ARCHITECTURES, UNEQUAL_HEADS, Metadata
from nanovllm.models.gguf.names import expert_names, usual_names
from nanovllm.models.gguf.plain_fields import PLAIN_FAMILIES
from nanovllm.models.gguf.rope_fields import rope_fields
from nanovllm.models.gguf.sigmoid_fields import SIGMOIDS
from nanovllm.models.gguf.sparse_fields import SPARSE, mixtral
from nanovllm.models.gguf.usual_fields import Config, attention_bias, biases, no_window
from nanovllm.models.gguf.usual_fields import window as window_of

# Where transformers has another name.
MODEL_TYPES = {
    "qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "hunyuan-dense": "hunyuan_v1_dense",
    "command-r": "cohere", "gptneox": "gpt_neox", "phi2": "phi", "gpt-oss": "gpt_oss",
    "glm4moe": "glm4_moe", "ernie4_5-moe": "ernie4_5_moe", "hunyuan-moe": "hunyuan_v1_moe",
    "minimax-m2": "minimax_m2", "mimo2": "mimo_v2_flash",
}  # fmt: skip
# Architectures that have no RMS norm.
LAYER_NORMS = {"command-r", "cohere2", *PLAIN_FAMILIES} - {"arcee", "apertus"}
HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
DTYPES = {"F32": "float32", "F16": "float16"}  # of matrices that are all of this type
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
IDS = "tokenizer.ggml.{}_token_id"


def config_fields(metadata: Metadata) -> Config:
    """The fields of a model's config. What is not supported is a ValueError that names its key."""
    config = _decoder(metadata) | FAMILIES[metadata.architecture](metadata)
    config |= rope_fields(metadata, config["head_dim"])
    for key in HARMLESS:
        metadata.get(key, None)
    metadata.only("attention.causal", (True,))
    metadata.only("pooling_type", (0, 3))  # none, or the last token's vector, as here
    if metadata.architecture not in PLAIN_FAMILIES:
        metadata.only("use_parallel_residual", (False,))
    if "num_experts_per_tok" not in config:
        metadata.only("expert_count", (0,))
        metadata.only("expert_used_count", (0,))
    metadata.refuse_unread()
    return config


def special_id(metadata: Metadata, name: str) -> int | None:
    """The id of a special token, such as "bos"; None if the file has none."""
    value = metadata.model.metadata.get(IDS.format(name))
    return value if type(value) is int and 0 <= value < _vocab_size(metadata) else None


def _decoder(metadata: Metadata) -> Config:
    """What all decoders have."""
    config = {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": MODEL_TYPES.get(metadata.architecture, metadata.architecture),
        "vocab_size": _vocab_size(metadata),
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": _inner_size(metadata),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.number_of_heads(),
        **(latent_heads if metadata.architecture in LATENT else _heads)(metadata),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.size("context_length"),
        "tie_word_embeddings": HEAD not in metadata.model.tensors,
        "bos_token_id": special_id(metadata, "bos"),
        "eos_token_id": special_id(metadata, "eos"),
        "torch_dtype": _dtype(metadata),
    }
    if metadata.architecture not in LAYER_NORMS:
        config["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    if types := _block_types(metadata):
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _heads(metadata: Metadata) -> Config:
    """The heads of keys, and the size of all heads."""
    usual = max(metadata.size("embedding_length") // metadata.number_of_heads(), 1)
    head_dim = metadata.size("attention.key_length", usual)
    if metadata.architecture in UNEQUAL_HEADS:  # the family reads the other numbers
        return {"num_key_value_heads": None, "head_dim": head_dim}
    metadata.only("attention.value_length", (head_dim,))
    return {"num_key_value_heads": metadata.number_of_heads("head_count_kv"), "head_dim": head_dim}


def _inner_size(metadata: Metadata) -> int:
    """The intermediate size. Hybrid models without dense parts have none."""
    key = "feed_forward_length"
    if metadata.architecture in HYBRIDS and not metadata.get(key, 0):
        return int(metadata.get("expert_feed_forward_length", 1))
    return int(metadata.size(key))


def _block_types(metadata: Metadata) -> dict[str, list[str]]:
    """The names of the layers whose matrices are stored in blocks, by the blocks' types."""
    types: dict[str, list[str]] = {}
    for name, info in metadata.model.tensors.items():
        if info.kind.name in BLOCK_TYPES and not _becomes_plain(name, info, metadata):
            types.setdefault(info.kind.name, []).extend(_layers(name, metadata.architecture))
            if name == EMBEDDINGS and HEAD not in metadata.model.tensors:
                types[info.kind.name].append(USUAL_HEAD)  # a head that shares the table
    return types


def _layers(name: str, architecture: str) -> list[str]:
    """The names of the layers whose matrices are in a tensor."""
    found = expert_names(name, 1, architecture) or usual_names(name, architecture)
    return [n.removesuffix(".weight").replace(".experts.0.", ".experts.*.") for n in found]


def _becomes_plain(name: str, info: TensorInfo, metadata: Metadata) -> bool:
    if metadata.architecture not in HYBRIDS:
        return name.endswith((KEYS_OF_LATENTS, VALUES_OF_LATENTS))
    from nanovllm.models.gguf.hybrid_tensors import is_decoded

    return is_decoded(name, info, metadata)


def _vocab_size(metadata: Metadata) -> int:
    """The rows of the embeddings' table: the vocabulary of the tokenizer may have fewer tokens."""
    if EMBEDDINGS not in metadata.model.tensors:
        raise ValueError(f"the file has no tensor {EMBEDDINGS}")
    return metadata.model.tensors[EMBEDDINGS].shape[0]


def _dtype(metadata: Metadata) -> str:
    """The type to compute in. The files do not say it."""
    tensors = metadata.model.tensors.values()
    kinds = {info.kind.name for info in tensors if len(info.shape) > 1}
    return DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _llama(metadata: Metadata) -> Config:
    """Llama, Mistral, which differs in that it has a window, and Mixtral, which has experts."""
    window = window_of(metadata)
    if metadata.get("expert_count", 0):
        return mixtral(metadata)
    if window is None:
        return biases(metadata)
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
            "sliding_window": window}  # fmt: skip


def _qwen2(metadata: Metadata) -> Config:
    return no_window(metadata)


def _qwen3(metadata: Metadata) -> Config:
    return {**attention_bias(metadata), **no_window(metadata)}


def _qwen3moe(metadata: Metadata) -> Config:
    """Experts in all layers. Their shares add up to 1: the converter does not say it."""
    for key, allowed in (
        ("expert_weights_norm", (True,)), ("expert_weights_scale", (0.0, 1.0)),
        ("expert_gating_func", (1,)), ("expert_shared_count", (0,)),
        ("expert_shared_feed_forward_length", (0,)), ("leading_dense_block_count", (0,)),
    ):  # fmt: skip
        metadata.only(key, allowed)
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_qwen3(metadata),
    }


def _phi3(metadata: Metadata) -> Config:
    return {"sliding_window": window_of(metadata), "attention_bias": False}


def _smollm3(metadata: Metadata) -> Config:
    """Every fourth layer rotates nothing: the files do not say it."""
    return {**biases(metadata), "no_rope_layer_interval": 4, **no_window(metadata)}


FAMILIES: dict[str, Callable[[Metadata], Config]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "phi3": _phi3,
    "smollm3": _smollm3, **DENSE, **GEMMA, **SPARSE, **PLAIN_FAMILIES, **HYBRIDS, **LATENT,
    **SIGMOIDS,
}  # fmt: skip
