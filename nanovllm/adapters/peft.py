"""Reading LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

The tensors say which modules have adapters; the config must agree with them. Every error names the
file, and the tensor or the field.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.adapters.base_weights import check_base_weight
from nanovllm.adapters.modules import Module, modules_of
from nanovllm.adapters.peft_config import PeftConfig, read_config
from nanovllm.adapters.tensors import AdapterTensors, Pair
from nanovllm.formats.names import full_name
from nanovllm.layers.file_order import outputs_of
from nanovllm.models.checkpoint import ordinary_file
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import FLOATS, InFile, errors_name
from nanovllm.utils.checks import did_you_mean

WEIGHTS_FILE = "adapter_model.safetensors"
BEGINNING = "base_model.model."  # each tensor's name begins with it
LOW_RANK = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?(2)|\.weight)")
BASE_WEIGHT = re.compile(r"(.+?)(?:\.base_layer)?\.weight")  # a weight of the model itself
UNSUPPORTED = {
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "lora_bias",
    "modules_to_save": "modules_to_save",
    "token_adapter": "trainable_token_indices",
    ".bias": "bias",
}
Files = dict[str, dict[str, InFile]]  # of a module's name, A and B


def read_adapter(path: str | Path, model: CausalLM, max_rank: int) -> AdapterTensors:
    """Read the adapter in a directory, for `model`, with B times the scale, in the model's type.

    The model does not change. A rank above `max_rank`, and whatever would not be computed as
    PEFT does, is a ValueError; a missing or damaged file an OSError. Peak memory: the adapter, and
    one of its tensors in float32.
    """
    path = Path(path)
    if not path.is_dir():
        raise NotADirectoryError(f"lora_path must be a local directory, got {str(path)!r}")
    config = read_config(path).renamed(model.names)
    file = path / WEIGHTS_FILE
    dtype = model.model.norm.weight.dtype
    with _open(file) as tensors, errors_name(file):
        modules, spelt = modules_of(model), dict[str, str]()
        stacks, stored = _stacks(modules, config), _pairs(tensors, model, spelt)
        _check_names(stored.keys() - stacks, modules)
        pairs = {stacks.get(name, name): files for name, files in stored.items()}
        _check_not_twice(pairs, modules)
        return {
            name: _read_pair(spelt.get(name, name), files, modules[name], config, max_rank, dtype)
            for name, files in pairs.items()
        }


@contextmanager
def _open(file: Path) -> Iterator[dict[str, InFile]]:
    """The tensors of a file by name."""
    if not (file.exists() or file.is_symlink()):
        old = file.with_name("adapter_model.bin").exists()
        hint = "; save it with safe_serialization=True" if old else ""
        raise FileNotFoundError(f"{file} does not exist{hint}")
    try:
        with safe_open(ordinary_file(file), framework="pt") as tensors:
            yield {name: InFile(tensors.get_slice(name)) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(
            f"{file} is truncated or damaged ({error}); copy or download it again"
        ) from error


def _stacks(modules: Mapping[str, Module], config: PeftConfig) -> dict[str, str]:
    """The modules of all experts' matrices, by the names of their tensors.

    PEFT wraps a layer's experts once for each parameter; the wrapper of the last one is outermost.
    """
    names: dict[str, str] = {}
    for module in reversed([*modules.values()]):
        if module.is_stack and config.has_parameter(module.name):
            wrapped = module.name.rpartition(".")[0]
            while wrapped in names:
                wrapped += ".base_layer"
            names[wrapped] = module.name
    return names


def _pairs(tensors: Mapping[str, InFile], model: CausalLM, spelt: dict[str, str]) -> Files:
    """A and B of each module. Raises for other tensors, unless they are the model's own.

    `spelt` gets the names in the file of modules that the family's files call otherwise.
    """
    pairs: Files = defaultdict(dict)
    for key, tensor in tensors.items():
        name = key.removeprefix(BEGINNING)
        if model.names.is_skipped(name):  # of a part of the model that text does not use
            continue
        for end, feature in UNSUPPORTED.items():
            if end in name:
                raise ValueError(f"tensor {key!r} is of {feature}, which is not supported")
        if match := LOW_RANK.fullmatch(name):
            embedding, ours = match[2] or "", full_name(model.names.ours(match[1]))
            pairs[ours][embedding + match[3]] = tensor
            if model.names.ours(match[1]) != match[1]:
                spelt[ours] = match[1]
        elif match := BASE_WEIGHT.fullmatch(name):
            check_base_weight(key, full_name(model.names.ours(match[1])), tensor, model)
        else:
            raise ValueError(f"unexpected tensor {key!r}")
    if not pairs:
        raise ValueError("has no tensors of adapters (lora_A and lora_B)")
    return pairs


def _check_names(names: Set[str], modules: Mapping[str, Module]) -> None:
    known = {name for name, module in modules.items() if not module.is_stack}
    if unknown := sorted(names - known):
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"module {unknown[0]!r} does not exist, or can have no adapter{hint}")


def _check_not_twice(pairs: Files, modules: Mapping[str, Module]) -> None:
    """Raise if a fused module and one of its parts have adapters, or all experts and one."""
    owners: dict[Any, str] = {}
    for name in pairs:
        module = modules[name]
        experts = range(module.num_experts) if module.is_stack else (module.expert,)
        for part in itertools.product(experts, module.projections):
            other = owners.setdefault((module.layer, module.matrix, part), name)
            if other != name:
                raise ValueError(f"modules {other!r} and {name!r} are the same matrix")


def _read_pair(
    name: str,
    files: Mapping[str, InFile],
    module: Module,
    config: PeftConfig,
    max_rank: int,
    dtype: torch.dtype,
) -> Pair:
    kind = "embedding_" if module.is_embedding else ""
    keys = {which: f"{name}.lora_{which}" for which in (f"{kind}A", f"{kind}B")}
    if missing := [key for which, key in keys.items() if which not in files]:
        raise ValueError(f"lacks {', '.join(missing)}")
    if other := files.keys() - keys:
        raise ValueError(f"module {name!r} has tensors of another kind: lora_{min(other)}")
    if not module.is_stack:
        try:
            config.check_has(name)
        except ValueError as error:
            raise ValueError(f"module {name!r} has an adapter, but {error}") from None
    (a_key, b_key), (a, b) = keys.values(), (files[which] for which in keys)
    rank = config.rank_of(name)
    ranks = rank * module.num_experts
    if tuple(a.shape) != (ranks, module.size_in):
        raise ValueError(_shape_error(a_key, a, (ranks, module.size_in), rank))
    if tuple(b.shape) != (module.size_out, ranks):
        raise ValueError(_shape_error(b_key, b, (module.size_out, ranks), rank))
    if rank > max_rank:
        raise ValueError(f"{name} has rank {rank}: max_lora_rank must be >= {rank}, got {max_rank}")
    down = _values(a_key, a).to(dtype)
    rows = outputs_of(module.layer, module.projections, _values(b_key, b))
    up = (rows * config.scale_of(name)).t().to(dtype)
    if module.is_stack:  # A has one expert's rows after the other, B's columns alternate
        down = down.view(-1, rank, module.size_in)
        up = up.reshape(rank, -1, module.size_out).transpose(0, 1)
    return Pair(down, up.contiguous())


def _shape_error(key: str, tensor: InFile, shape: tuple[int, int], rank: int) -> str:
    return (
        f"tensor {key!r} has shape {tuple(tensor.shape)}, the model and the config's rank {rank}"
        f" need {shape}"
    )


def _values(key: str, tensor: InFile) -> torch.Tensor:
    """A tensor's values in float32."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"tensor {key!r} has type {tensor.dtype}, allowed: {', '.join(FLOATS)}")
    values = tensor[...].float()
    if not bool(values.isfinite().all()):
        raise ValueError(f"tensor {key!r} has values that are not finite")
    return values
