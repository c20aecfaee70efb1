"""Loading one rank's part of a model."""

import logging
import time
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.engine.start.placement import Placement
from nanovllm.formats.format import PLAIN_FORMATS, Formats
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import errors_name, load_model
from nanovllm.models.parts import build_model
from nanovllm.utils.resources import memory_text, trim_heap

logger = logging.getLogger("nanovllm")


def load_part(
    config: Config, model_config: ModelConfig, path: Path, placement: Placement
) -> CausalLM:
    """Load this rank's part of the model. `config` is settled by the placement."""
    start = time.perf_counter()
    with errors_name(path):
        formats = choose_formats(config, model_config, path)
        model = empty_model(config, model_config, placement, formats)
    with torch.no_grad():
        if config.load_format == "dummy":
            from nanovllm.models.dummy import load_dummy

            with torch.device("meta"):
                whole = build_model(model_config, placement.max_positions, formats=formats)
            load_dummy(model, whole, config.seed)
        else:
            load_model(model, path, use_tqdm=placement.ranks.rank == 0)
        num_bytes = model.num_bytes
        # Only decode graphs: launching few_rows takes the host longer than it saves the device.
        with errors_name(path):
            backend = placement.backend
            model.bind(backend, few_rows=backend.graph_safe and not config.enforce_eager)
    trim_heap()
    quantized = model_config.quantization.descriptions if model_config.quantization else []
    logger.info(
        "%s on %s in %s, %s loaded in %.1f s; quantized: %s; attention: %s, other kernels: %s",
        model_config.architecture, placement.device, str(placement.dtype).removeprefix("torch."),
        memory_text(num_bytes), time.perf_counter() - start,
        "; ".join(quantized) or "no", placement.backend.attention.name,
        placement.backend.kernels.name,
    )  # fmt: skip
    return model.eval()


def choose_formats(config: Config, model_config: ModelConfig, path: Path) -> Formats:
    """Choose how the layers' weights are stored. Reads names and types in quantized files."""
    quantization = model_config.quantization
    if config.load_format == "safetensors":
        from nanovllm.models.gguf.directory import refuse_gguf

        refuse_gguf(path)
    if quantization is None:
        return PLAIN_FORMATS
    from nanovllm.models.quantized import quantized_formats

    return quantized_formats(quantization, path, has_files=config.load_format != "dummy")


def empty_model(
    config: Config, model_config: ModelConfig, placement: Placement, formats: Formats
) -> CausalLM:
    """Make the model on the placement's device, with parameters that are not yet filled."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device, torch.inference_mode(False):
            return build_model(
                model_config, placement.max_positions, placement.ranks,
                config.enable_expert_parallel, formats,
            )  # fmt: skip
    except (MemoryError, RuntimeError) as error:
        # The type and the text by which the allocators of GPU and CPU are known.
        is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_of_memory and "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(
            f"no memory on {placement.device} for a model with {model_config.sizes}, at"
            f" {placement.max_positions} positions (max_model_len)"
        ) from error
    finally:
        torch.set_default_dtype(previous)
