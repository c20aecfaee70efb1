"""Show a model's size, whether it runs here, and the memory it needs. Reads no weights."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from nanovllm.command.options import (
    UsageError,
    add_engine_options,
    add_model_argument,
    engine_options,
)
from nanovllm.utils.resources import GIB, memory_text

if TYPE_CHECKING:
    from nanovllm.bench.roofline import HeadBytes
    from nanovllm.config import Config
    from nanovllm.layers.backend import AttentionSpec
    from nanovllm.models.config import ModelConfig

NAME = "info"
SUMMARY = "show a model's size, whether it runs here, and the memory it needs"
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
MEMORIES_GIB = (8, 16, 24, 40, 48, 80, 141)  # memory of common GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the description; 1 if the model is not supported."""
    if "speculative_config" in args:
        raise UsageError(
            "--speculative-config: this command describes one model; name the draft model as MODEL"
        )
    info = describe(engine_options(args))
    print(json.dumps(info) if args.json else _text(info))
    return 0 if info["supported"] else 1


def describe(options: dict[str, Any]) -> dict[str, Any]:
    """Describe a model from its config and this machine; figures are for the whole model."""
    from nanovllm.config import Config
    from nanovllm.engine.start.placement import (
        attention_specs,
        resolve_device,
        resolve_dtype,
        resolve_kv_dtype,
    )
    from nanovllm.kernels.kv_layer import head_bytes
    from nanovllm.models import model_size
    from nanovllm.models.checkpoint import CONFIG_FILES, resolve_model
    from nanovllm.models.config import ModelConfig

    config = Config(**options)
    path = resolve_model(
        config.model, CONFIG_FILES, revision=config.revision, download_dir=config.download_dir,
        quantization=config.quantization,
    )  # fmt: skip
    model = ModelConfig.from_dir(path, config.quantization)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    specs = attention_specs(config, model, device, dtype, kv_dtype)
    backend, refusal = _backend(config, model, specs)
    distinct = dict.fromkeys(spec.heads for spec in specs)
    heads = [dict(zip(HEADS, each, strict=True)) for each in distinct]
    return {
        "model": config.model,
        "architecture": model.architecture,
        "supported": refusal is None,
        "refusal": refusal,
        "attention_backend": backend,
        "device": str(device),
        "num_parameters": model_size.num_params(model),
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "heads": heads,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_position_embeddings,
        "checkpoint_dtype": model.dtype,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": model.quantization.descriptions if model.quantization else [],
        **_memory(config, model, dtype.itemsize, lambda dim: head_bytes(dim, kv_dtype)),
    }


def _memory(
    config: "Config", model: "ModelConfig", itemsize: int, head_bytes: "HeadBytes"
) -> dict[str, Any]:
    """Bytes of weights and KV, and the KV tokens that fit with the weights, by size of memory."""
    from nanovllm.bench import roofline
    from nanovllm.models import model_size
    from nanovllm.models.model_size import WeightBytes

    kv_bytes = roofline.kv_bytes_per_token(model, head_bytes)
    state_bytes = roofline.state_bytes(model, itemsize)
    sizes = WeightBytes(itemsize, model.quantization)
    weight_bytes = model_size.model_bytes(model, sizes)
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "state_bytes_per_sequence": state_bytes,
        "kv_tokens_by_gib": {
            gib: max(0, int(gib * GIB * config.gpu_memory_utilization) - weight_bytes) // kv_bytes
            for gib in (MEMORIES_GIB if kv_bytes else ())
        },
    }


def _backend(
    config: "Config", model: "ModelConfig", specs: "list[AttentionSpec]"
) -> tuple[str | None, str | None]:
    """The name of the attention backend that fits all layers, or the reason why there is none."""
    from nanovllm.engine.start.placement import check_kv_dtype
    from nanovllm.layers.backends import choose_backend

    try:
        check_kv_dtype(model, specs[0].kv_dtype)
        model.check_parallel_size(config.tensor_parallel_size, config.enable_expert_parallel)
        return choose_backend(config.attention_backend, *specs).attention.name, None
    except ValueError as error:
        return None, str(error)


def _heads_text(heads: dict[str, int]) -> str:
    return "{} heads and {} KV heads of {}".format(*(heads[name] for name in HEADS))


def _text(info: dict[str, Any]) -> str:
    supported = f"not supported: {info['refusal']}"
    if info["supported"]:
        supported = f"supported, by {info['attention_backend']!r} on {info['device']}"
    longest = info["max_model_len"] * info["kv_bytes_per_token"]
    lines = [
        f"{info['model']}: {info['architecture']}, {supported}",
        f"  {info['num_parameters'] / 1e6:,.1f}M parameters, {info['num_layers']} layers of"
        f" {info['hidden_size']}, {' or '.join(map(_heads_text, info['heads']))},"
        f" vocabulary {info['vocab_size']:,}",
        f"  weights: {memory_text(info['weight_bytes'])} in {info['dtype']}"
        f" (checkpoint: {info['checkpoint_dtype']})",
        *(f"  quantized: {scheme}" for scheme in info["quantization"]),
    ]
    if info["state_bytes_per_sequence"]:
        lines.append(f"  states: {memory_text(info['state_bytes_per_sequence'])} a sequence")
    if not info["kv_bytes_per_token"]:
        return "\n".join(lines)
    lines += [
        f"  KV cache: {info['kv_bytes_per_token']:,} bytes a token,"
        f" {memory_text(longest)} for the longest sequence, {info['max_model_len']:,} tokens",
        "  KV tokens that fit with the weights, by memory (activations not counted):",
    ]
    fits = info["kv_tokens_by_gib"].items()
    return "\n".join(
        [
            *lines,
            *(
                f"  {gib:7} GiB {tokens:14,}" if tokens else f"  {gib:7} GiB           none"
                for gib, tokens in fits
            ),
        ]
    )
