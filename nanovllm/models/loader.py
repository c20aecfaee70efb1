"""From a checkpoint's files to a model's parameters, each filled exactly once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from nanovllm.layers.layer import Layer, Loaded
from nanovllm.models.config import read_json
from nanovllm.models.decoder import CausalLM

INDEX = "model.safetensors.index.json"
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
NUM_THREADS = 4  # that copy, as a file's pages are waited for
CONFIG_FILES = ("config.json", "generation_config.json")


def resolve_model(model: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """The directory of `model`: a local one, or that of a hub id, with `files` downloaded."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise NotADirectoryError(f"model must be a directory, {model!r} is a file")
    except (RuntimeError, ValueError) as error:  # no such user; a NUL in the name
        raise FileNotFoundError(f"model directory {model!r} cannot exist: {error}") from None
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise FileNotFoundError(f"model directory {model!r} does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
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


class InFile:
    """A tensor in a file: indexing reads that part of it, and nothing else."""

    def __init__(self, part: Any) -> None:
        self._part = part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._part.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        with torch.device("cpu"):  # safetensors makes it on PyTorch's default device
            tensor: torch.Tensor = self._part[index]
        return tensor


def read_weights(path: Path) -> Iterator[dict[str, InFile]]:
    """Yield the tensors of a checkpoint by name, a file at a time, from mapped memory."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                yield {name: InFile(tensors.get_slice(name)) for name in names}
        except SafetensorError as error:
            raise OSError(
                f"{file} is truncated or damaged ({error}); copy or download it again"
            ) from error


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor goes: to a parameter, or to a part of one that is fused."""

    param: str
    shard_id: int | None
    parts: tuple[str, ...]  # what it is: itself, or all the parts of a fused parameter


def load_model(model: CausalLM, path: Path, use_tqdm: bool = False) -> None:
    """Fill `model` from the safetensors files in `path`.

    Afterwards every parameter has been filled exactly once, and every tensor of the files was used
    or is one that the model calls spare; anything else is a ValueError that names the tensor. What
    the model holds fused, the files may hold in parts or fused. A rank reads its own parts and
    nothing else. Files come one after the other, and a few threads copy a file's tensors; of
    several errors the first one's is raised. Peak host memory: what the rank holds, and the mapped
    files' pages, which the system may drop; where a GPU converts types, a tensor for each thread
    there. `use_tqdm` shows a bar where stderr is a terminal.
    """
    places = checkpoint_places(model)
    missing = {part: place.param for place in places.values() for part in place.parts}
    fused = False

    def fill(item: tuple[str, InFile]) -> int:
        name, tensor = item
        place = places[name]
        try:
            _fill(model, place.param, place.shard_id, tensor)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r} has {error}") from None
        return len(place.parts)

    hide = None if use_tqdm else True  # None: unless it is a terminal
    bar = tqdm(total=len(missing), desc="Loading", unit="tensor", disable=hide)
    with bar, ThreadPoolExecutor(NUM_THREADS, "nanovllm-load") as pool:
        for tensors in read_weights(path):
            needed = {name: t for name, t in tensors.items() if not _is_spare(model, name)}
            _claim(path, needed, places, missing)
            fused |= any(len(places[name].parts) > 1 for name in needed)
            for num_parts in pool.map(fill, needed.items()):  # in order; an error ends the rest
                bar.update(num_parts)
    if missing:
        names = [*dict.fromkeys(missing.values() if fused else missing)]  # as these files spell it
        rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"{path}: the files lack {', '.join(names[:5])}{rest}")


def _is_spare(model: CausalLM, name: str) -> bool:
    return name in model.spare_weights or name.endswith("rotary_emb.inv_freq")


def _claim(
    path: Path, names: Iterable[str], places: Mapping[str, Place], missing: dict[str, str]
) -> None:
    """Take the tensors `names` off what is missing; refuse those that are not."""
    for name in names:
        if name not in places:
            raise ValueError(f"{path}: unexpected tensor {name!r}")
        for part in places[name].parts:
            if part not in missing:
                raise ValueError(f"{path}: tensor {name!r} stands in two files, or in parts too")
            del missing[part]


def checkpoint_places(model: CausalLM) -> dict[str, Place]:
    """Where each tensor that a checkpoint may have goes, fused or in parts."""
    places: dict[str, Place] = {}
    for name, _ in model.named_parameters():
        *above, parent, leaf = name.split(".")
        layer = _layer(model, ".".join([*above, parent]))
        packed = model.packed_modules_mapping.items()
        ends = [[part, leaf] for part, (fused, _) in packed if fused == parent]
        ends += [[parent, part] for part in layer.parts(leaf)]
        parts = tuple(".".join([*above, *end]) for end in ends)
        places[name] = Place(name, None, parts or (name,))
        places |= {part: Place(name, shard_id, (part,)) for shard_id, part in enumerate(parts)}
    return places


def _layer(model: CausalLM, name: str) -> Layer:
    layer = model.get_submodule(name)
    assert isinstance(layer, Layer), "what has parameters is a Layer"
    return layer


@torch.inference_mode()  # which is each thread's own
def _fill(model: CausalLM, target: str, shard_id: int | None, tensor: Loaded) -> None:
    layer = _layer(model, target.rpartition(".")[0])
    layer.weight_loader(model.get_parameter(target), tensor, shard_id)


def load_dummy(model: CausalLM, whole: CausalLM, seed: int) -> None:
    """Give every matrix of `model` random weights, the same however many ranks there are.

    `whole` is the model of one rank by itself, for its shapes; it may stand on the meta device.
    Peak memory: what this rank holds, and one whole matrix.
    """
    for index, (name, shape) in enumerate((n, p.shape) for n, p in whole.named_parameters()):
        if len(shape) == 1:  # norms' weights are ones, biases zeros, from the start
            continue
        param = model.get_parameter(name)
        generator = torch.Generator(device=param.device).manual_seed(seed + index)
        matrix = torch.empty(shape, dtype=param.dtype, device=param.device)
        matrix.normal_(0.0, 0.02, generator=generator)
        _fill(model, name, None, matrix)
