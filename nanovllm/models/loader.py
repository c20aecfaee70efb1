"""Loading: a checkpoint's files fill a model's parameters, each exactly once."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.formats.format import tensor_of
from nanovllm.formats.names import checkpoint_name, usual_name
from nanovllm.formats.stored import Loaded
from nanovllm.layers.layer import Layer
from nanovllm.models.checkpoint import weight_files
from nanovllm.models.decoder import Model
from nanovllm.utils.checks import shorten
from nanovllm.utils.interrupts import make_bar

logger = logging.getLogger("nanovllm")

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E8M0")  # by safetensors' names
TYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}
NUM_THREADS = 4  # for copying: a thread waits while pages of the file are read
SMALL = 1 << 28  # bytes of files that one thread copies: others would leave a MiB of heap each


class InFile:
    """A tensor in a file. Indexing reads only the indexed part."""

    def __init__(self, tensor_slice: Any) -> None:
        self._slice = tensor_slice

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    @property
    def dtype(self) -> str:
        """The name that safetensors gives to the type."""
        return str(self._slice.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        with torch.device("cpu"):  # safetensors uses PyTorch's default device
            tensor: torch.Tensor = self._slice[index]
        return tensor


def read_weights(path: Path) -> Iterator[dict[str, InFile]]:
    """Yield the tensors of each file by name. They are read from mapped memory."""
    files = weight_files(path)
    if files[0].suffix == ".gguf":
        from nanovllm.models.gguf.tensors import read_gguf

        for views in read_gguf(files[0]):  # and of the other parts
            yield {name: InFile(view) for name, view in views.items()}
        return
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                yield {n: InFile(tensors.get_slice(n)) for n in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            broken = f"{file} is truncated or damaged ({error}); copy or download it again"
            raise OSError(broken) from error


@contextmanager
def errors_name(path: Path, model: Model | None = None) -> Iterator[None]:
    """Give the ValueErrors of a block the checkpoint's name, and the names in files of tensors."""
    try:
        yield
    except ValueError as error:
        from nanovllm.models.file_names import error_of_files

        raise error_of_files(error, path, model, read_weights(path), checkpoint_targets) from None


@dataclass(frozen=True)
class Target:
    """Where a checkpoint's tensor is loaded: into a parameter, or into a part of a fused one."""

    param: str
    shard_id: int | None
    parts: tuple[str, ...]  # of a fused tensor, the names of all its parts; else its own name


def load_model(
    model: Model,
    path: Path,
    use_tqdm: bool = False,
    files: Iterable[dict[str, InFile]] | None = None,
) -> None:
    """Fill `model` from the safetensors files in `path`, or from these `files` of it.

    It fills every parameter exactly once and uses every tensor of the files, except tensors without
    an effect and tensors that the model's names skip. Anything else is a ValueError that names the
    tensor as the files do. For a fused parameter, the files have the parts or the fused tensor; for
    a tied parameter either name, or both with the same values. A rank reads only its own part of a
    tensor.

    Files are read one after the other; a few threads copy a file's tensors (one, if the files are
    small), and the first error in file order is raised. Peak host memory: what the rank holds, plus
    the mapped pages of the files, which the system may drop. Where a GPU converts types: a tensor
    on the GPU for each thread. `use_tqdm` shows a progress bar if stderr is a terminal.
    """
    names, skipped = model.names, list[str]()
    targets = checkpoint_targets(model)
    missing = {part: target.param for target in targets.values() for part in target.parts}
    is_fused = False  # whether the files hold fused tensors
    found: set[str] = set()
    second: dict[str, InFile] = {}  # the tensors of a file that a tied tensor has filled

    def fill(item: tuple[str, InFile]) -> int:
        name, tensor = item
        target = targets[name]
        try:
            check_type(tensor.dtype, model.get_parameter(target.param).dtype)
            if name in second:
                from nanovllm.models.tied import check_equal

                check_equal(model, target.param, tensor)
            else:
                fill_param(model, target.param, target.shard_id, tensor)
        except ValueError as error:
            raise ValueError(f"tensor {name!r} has {error}") from None
        return len(target.parts)

    # None hides it unless stderr is a terminal.
    bar = make_bar(total=len(missing), desc="Loading", unit="tensor", disable=not use_tqdm or None)
    size = SMALL if files else sum(file.stat().st_size for file in weight_files(path))
    number = NUM_THREADS if size >= SMALL else 1
    with errors_name(path, model), bar, ThreadPoolExecutor(number, "nanovllm-load") as pool:
        for tensors in files or read_weights(path):
            kept = [name for name in tensors if not names.is_skipped(name)]
            skipped += sorted(tensors.keys() - kept)
            tensors = {usual_name(name, names, targets): tensors[name] for name in kept}
            used = {n: t for n, t in tensors.items() if not is_left_out(n, t, targets)}
            if not model.tied_weights.keys().isdisjoint((*found, *used)):
                from nanovllm.models.tied import second_names

                second = {n: used.pop(n) for n in second_names(model.tied_weights, used, found)}
            found |= tensors.keys()
            mark_found(used, targets, missing)
            is_fused |= any(len(targets[name].parts) > 1 for name in used)
            for num_parts in pool.map(fill, used.items()):  # in order; stops at the first error
                bar.update(num_parts)
            for item in second.items():
                fill(item)
        if missing:
            from nanovllm.models.file_errors import missing_tensors

            raise missing_tensors(missing.values() if is_fused else missing)
        if not are_finite(model):
            from nanovllm.models.not_finite import check_each

            check_each(model, zip(weight_files(path), read_weights(path), strict=True))
    if skipped:
        logger.info("%d tensors of %s are left out: %s", len(skipped), path, shorten(skipped))


@torch.inference_mode()
def are_finite(model: Model) -> bool:
    """Whether the sums of the parameters are finite. Reads each parameter once, and syncs once."""
    floats = (p for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    params = (p for p in floats if not p.is_meta)  # such as one that is stored in codes
    return bool(torch.stack([p.sum().float() for p in params]).isfinite().all())


def is_left_out(name: str, tensor: InFile, targets: Mapping[str, Target]) -> bool:
    """Whether a tensor has no effect: old inverse frequencies, and zeros as biases.

    Some tools give each quantized layer a bias.
    """
    if name.endswith(".bias") and name not in targets:
        return f"{name.removesuffix('bias')}qweight" in targets and not bool(tensor[...].any())
    return name.endswith("rotary_emb.inv_freq")


def check_type(found: str, needed: torch.dtype) -> None:
    """Raise unless values of the type `found` can fill a parameter: floats are converted."""
    allowed = FLOATS if needed not in TYPES else (TYPES[needed],)
    if found not in allowed and needed != torch.uint8:  # blocks: their type chose the format
        raise ValueError(f"type {found}, a model needs one of {', '.join(allowed)}")


def mark_found(
    names: Iterable[str], targets: Mapping[str, Target], missing: dict[str, str]
) -> None:
    """Remove the tensors `names` from `missing`. An unknown or repeated one is a ValueError."""
    for name in names:
        if name not in targets:
            from nanovllm.models.file_errors import unexpected_tensor

            raise unexpected_tensor(name)
        for part in targets[name].parts:
            if part not in missing:
                raise ValueError(f"tensor {name!r} is in two files, or both fused and in parts")
            del missing[part]


def checkpoint_targets(model: Model) -> dict[str, Target]:
    """The target of each tensor that a checkpoint may have, fused or in parts."""
    targets: dict[str, Target] = {}
    for name, _ in model.named_parameters():
        *above, parent, leaf = name.split(".")
        layer = layer_of(model, ".".join([*above, parent]))
        tensor, only = tensor_of(leaf)
        fused = enumerate(model.names.parts(parent))
        ends = {i: [part, tensor] for i, part in fused if only in (None, i)}
        ends |= {i: [parent, part] for i, part in enumerate(layer.parts(leaf))}
        parts = {i: ".".join([*above, *end]) for i, end in ends.items()}
        if only is None:
            own = checkpoint_name(name)
            targets[own] = Target(name, None, tuple(parts.values()) or (own,))
        targets |= {part: Target(name, shard_id, (part,)) for shard_id, part in parts.items()}
    targets |= {alias: targets[name] for alias, name in model.tied_weights.items()}
    return targets


def layer_of(model: Model, name: str) -> Layer:
    """The layer of a model by its name."""
    layer = model.get_submodule(name)
    assert isinstance(layer, Layer), "only a Layer has parameters"
    return layer


@torch.inference_mode()  # here, because each thread has its own mode
def fill_param(model: Model, param: str, shard_id: int | None, tensor: Loaded) -> None:
    """Fill a parameter by its name, or the part `shard_id` of it, with a checkpoint's tensor."""
    layer = layer_of(model, param.rpartition(".")[0])
    layer.weight_loader(model.get_parameter(param), tensor, shard_id)
