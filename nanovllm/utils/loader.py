"""From a checkpoint's files to a model's parameters, each filled exactly once."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.layers.linear import copy_into
from nanovllm.models.config import read_json
from nanovllm.models.qwen3 import Qwen3ForCausalLM

INDEX = "model.safetensors.index.json"


def resolve_model(model: str) -> Path:
    """The directory of `model`: a local one, or a hub id's, downloaded if it is not cached."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"model must be a directory, {model!r} is a file")
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise FileNotFoundError(f"model directory {model!r} does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        )
    except Exception as error:  # offline, unknown, gated: the hub has a class for each
        raise OSError(
            f"{model!r} is no local directory, and downloading it failed: {error}"
        ) from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; one that is missing is an error that names it."""
    if (path / INDEX).exists():
        index = read_json(path / INDEX)
        if not isinstance(index.get("weight_map"), dict):
            raise OSError(f"{path / INDEX} has no weight_map")
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{path} lacks {', '.join(missing)}, which its index names")
    if not files:
        hint = "; convert its .bin files to safetensors" if list(path.glob("*.bin")) else ""
        raise FileNotFoundError(f"{path} has no .safetensors file{hint}")
    return files


def read_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint by name, one at a time, from mapped memory."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise OSError(
                f"{file} is truncated or damaged ({error}); copy or download it again"
            ) from error


def load_model(model: Qwen3ForCausalLM, path: Path) -> None:
    """Fill `model` from the safetensors files in `path`.

    Afterwards every parameter has been filled exactly once, and every tensor of the files was used
    or is one that the model calls spare; anything else is a ValueError that names the tensor. Peak
    host memory: the mapped files' pages, which the system may drop, beside the model.
    """
    params = dict(model.named_parameters())
    filled = dict.fromkeys(params, 0)
    seen: set[tuple[str, int | None]] = set()
    for name, tensor in read_weights(path):
        if name in model.spare_weights or name.endswith("rotary_emb.inv_freq"):
            continue
        target, shard_id = _place(model, name)
        if target not in params:
            raise ValueError(f"{path}: unexpected tensor {name!r}")
        if (target, shard_id) in seen:
            raise ValueError(f"{path}: tensor {name!r} stands in two files")
        seen.add((target, shard_id))
        try:
            filled[target] += _fill(model, target, tensor, shard_id)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r} has {error}") from None
    missing = [name for name, param in params.items() if filled[name] != param.numel()]
    if missing:
        raise ValueError(
            f"{path}: the files hold no (or not all) values for {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )


def _place(model: Qwen3ForCausalLM, name: str) -> tuple[str, int | None]:
    """The parameter that a tensor goes to, and which part of it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in model.packed_modules_mapping:
            parts[index], shard_id = model.packed_modules_mapping[part]
            return ".".join(parts), shard_id
    return name, None


def _fill(model: nn.Module, target: str, tensor: torch.Tensor, shard_id: int | None) -> int:
    module_name, _, _ = target.rpartition(".")
    param = model.get_parameter(target)
    loader = getattr(model.get_submodule(module_name), "weight_loader", None)
    if loader is None:
        return copy_into(param, tensor)
    return int(loader(param, tensor, shard_id))


def load_dummy(model: nn.Module, seed: int) -> None:
    """Give every matrix of `model` random weights: nothing but its config is needed."""
    for index, param in enumerate(model.parameters()):
        if param.dim() > 1:  # norms' weights are ones, biases zeros, from the start
            generator = torch.Generator(device=param.device).manual_seed(seed + index)
            param.data.normal_(0.0, 0.02, generator=generator)
