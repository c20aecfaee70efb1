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
from nanovllm.config import Config
from nanovllm.utils.resources import GIB, memory_text

if TYPE_CHECKING:
    from nanovllm.bench.roofline import HeadBytes
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
    options = engine_options(args)
    asked = Config(**options).speculative_config
    if asked is not None and asked.method != "mtp":
        raise UsageError(
            "--speculative-config: this command describes one model, with the head in its files if"
            " the method is mtp; name a draft model as MODEL"
        )
    info = describe(options)
    print(json.dumps(info) if args.json else _text(info))
    return 0 if info["supported"] else 1


def describe(options: dict[str, Any]) -> dict[str, Any]:
    """Describe a model from its config and this machine; figures are for the whole model."""
    from nanovllm.engine.start.placement import (
        attention_specs,
        resolve_device,
        resolve_dtype,
        resolve_kv_dtype,
    )
    from nanovllm.kernels.kv_layer import head_bytes
    from nanovllm.layers.cache_spec import State, TokenCache
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
    caches = [cache for layer in model.layers for cache in layer.cache.each]
    distinct = dict.fromkeys(each.heads for each in caches if isinstance(each, TokenCache))
    heads = [dict(zip(HEADS, each, strict=True)) for each in distinct]
    if config.speculative_config:
        from nanovllm.drafting.mtp_source import check_config

        check_config(path, model)
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
        **{name: getattr(model, name) if heads else None for name in HEADS},
        "heads": heads,
        "num_layers_with_states": sum(
            any(isinstance(each, State) for each in layer.cache.each) for layer in model.layers
        ),
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
    """Bytes of weights, KV and states, and what fits with the weights, by size of memory."""
    from nanovllm.bench import roofline
    from nanovllm.command.fits import Needs
    from nanovllm.models import model_size
    from nanovllm.models.model_size import WeightBytes

    kv_bytes = roofline.kv_bytes_per_token(model, head_bytes)
    state_bytes = roofline.state_bytes(model, itemsize)
    sizes = WeightBytes(itemsize, model.quantization)
    weight_bytes, drafts, head = model_size.model_bytes(model, sizes), 0, {}
    if config.speculative_config:
        drafts = config.speculative_config.most_drafts
        head = _draft_head(model, itemsize, head_bytes)
    needs = Needs(
        weight_bytes + head.get("weight_bytes", 0), kv_bytes + head.get("kv_bytes_per_token", 0),
        state_bytes, 1 + drafts,
    )  # fmt: skip
    options = config.max_num_seqs, config.enable_prefix_caching
    fits = {
        gib: needs.fit(int(gib * GIB * config.gpu_memory_utilization), *options)
        for gib in MEMORIES_GIB
    }
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "state_bytes_per_sequence": needs.slots_each * state_bytes,
        "draft_head": head or None,
        "kv_tokens_by_gib": {gib: fit.kv_tokens for gib, fit in fits.items() if kv_bytes},
        "num_seqs_by_gib": {gib: fit.num_seqs for gib, fit in fits.items() if state_bytes},
    }


def _draft_head(model: "ModelConfig", itemsize: int, head_bytes: "HeadBytes") -> dict[str, int]:
    """The size of the draft head in the model's files."""
    from nanovllm.bench import roofline
    from nanovllm.drafting.mtp_head import one_layer
    from nanovllm.drafting.mtp_source import head_size

    number, num_bytes = head_size(model, itemsize)
    return {
        "num_parameters": number,
        "weight_bytes": num_bytes,
        "kv_bytes_per_token": roofline.kv_bytes_per_token(one_layer(model), head_bytes),
    }


def _backend(
    config: "Config", model: "ModelConfig", specs: "list[AttentionSpec]"
) -> tuple[str | None, str | None]:
    """The name of the attention backend that fits all layers, or the reason why there is none."""
    from nanovllm.engine.start.placement import check_kv_dtype
    from nanovllm.layers.backends import choose_backend
    from nanovllm.models.invariance import check_invariance

    try:
        if config.batch_invariant:
            check_invariance(config, model)
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
    with_states = info["num_layers_with_states"]
    parts = [
        f"{info['num_parameters'] / 1e6:,.1f}M parameters",
        f"{info['num_layers']} layers of {info['hidden_size']}",
        *([f"{with_states} of them with states"] if with_states else []),
        *([" or ".join(map(_heads_text, info["heads"]))] if info["heads"] else []),
        f"vocabulary {info['vocab_size']:,}",
    ]
    lines = [
        f"{info['model']}: {info['architecture']}, {supported}",
        f"  {', '.join(parts)}",
        f"  weights: {memory_text(info['weight_bytes'])} in {info['dtype']}"
        f" (checkpoint: {info['checkpoint_dtype']})",
        *(f"  quantized: {scheme}" for scheme in info["quantization"]),
    ]
    if head := info["draft_head"]:
        lines.append(
            f"  draft head: {head['num_parameters'] / 1e6:,.1f}M parameters,"
            f" {memory_text(head['weight_bytes'])}, {head['kv_bytes_per_token']:,} bytes of KV a"
            " token"
        )
    if info["state_bytes_per_sequence"]:
        lines.append(f"  states: {memory_text(info['state_bytes_per_sequence'])} a sequence")
    if of_token := info["kv_bytes_per_token"]:
        lines.append(
            f"  KV cache: {of_token:,} bytes a token,"
            f" {memory_text(info['max_model_len'] * of_token)} for the longest sequence,"
            f" {info['max_model_len']:,} tokens"
        )
    return "\n".join([*lines, *_table(info["kv_tokens_by_gib"], info["num_seqs_by_gib"])])


def _table(kv_tokens: dict[int, int], num_seqs: dict[int, int]) -> list[str]:
    """The lines that say what fits, by memory."""
    what = ["KV tokens"] * bool(kv_tokens) + ["running sequences"] * bool(num_seqs)
    if not what:
        return []
    lines = [
        f"  {' and '.join(what)} that fit with the weights, by memory (activations not counted):"
    ]
    for gib in kv_tokens or num_seqs:
        fit = [by_gib[gib] for by_gib in (kv_tokens, num_seqs) if by_gib]
        cells = [f"{number:14,}" for number in fit] if any(fit) else [f"{'none':>14}"]
        lines.append(f"  {gib:7} GiB {''.join(cells)}")
    return lines
