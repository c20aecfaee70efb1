"""Read the files of an EAGLE-3 head: safetensors or a `.bin` file, with two schemes of names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.drafting.eagle3_head import Eagle3Head
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.checkpoint import MODEL_PATTERNS, ordinary_file
from nanovllm.models.dummy import load_dummy
from nanovllm.models.loader import InFile, load_model, read_weights

PICKLED = "pytorch_model.bin"
HEAD_PATTERNS = (*MODEL_PATTERNS, PICKLED)
EMBEDDING, VOCABULARY = "embed_tokens.weight", "d2t.offsets"
LAYER, OTHER_LAYER = "midlayer.", "layers.0."  # the second one in files of the speculators library
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64",
}  # fmt: skip


class Pickled:
    """A tensor of a `.bin` file, with the methods of a slice of a safetensors file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return TYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def read_head(path: Path) -> Iterator[dict[str, InFile]]:
    """The tensors of a head's files, by our names; without `t2d`, the inverse of `d2t`."""
    for tensors in _files(path):
        yield {_own_name(name): tensor for name, tensor in tensors.items() if name != "t2d"}


def _files(path: Path) -> Iterator[dict[str, InFile]]:
    """The tensors of each file, by the names in the file."""
    is_pickled = (path / PICKLED).exists() and not list(path.glob("*.safetensors"))
    return _unpickled(path / PICKLED) if is_pickled else read_weights(path)


def _own_name(name: str) -> str:
    if name.startswith(OTHER_LAYER):
        return name.replace(OTHER_LAYER, LAYER, 1)
    return VOCABULARY if name == "d2t" else name


@contextlib.contextmanager
def _errors_name_as_files(path: Path) -> Iterator[None]:
    """Make errors in the block name tensors by their names in the files."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace(VOCABULARY, "d2t")
        if any(name.startswith(OTHER_LAYER) for tensors in _files(path) for name in tensors):
            text = text.replace(LAYER, OTHER_LAYER)
        raise ValueError(text) from None


def _unpickled(file: Path) -> Iterator[dict[str, InFile]]:
    ordinary_file(file)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        yield {name: InFile(Pickled(tensor)) for name, tensor in tensors.items()}
    except Exception as error:  # of any type, for a damaged file
        raise OSError(f"{file} is damaged or holds other than tensors: {error}") from error


def load_head(
    path: Path, config: HeadConfig, max_positions: int, ranks: Ranks = ALONE
) -> Eagle3Head:
    """Load the head, in PyTorch's default type, on its default device."""
    names = {name for tensors in read_head(path) for name in tensors}
    knows_all = config.draft_vocab_size == config.layer.vocab_size and VOCABULARY not in names
    head = Eagle3Head(config, max_positions, ranks, EMBEDDING in names, not knows_all)
    with torch.no_grad(), _errors_name_as_files(path):
        load_model(head, path, files=read_head(path))
    if EMBEDDING not in names and config.needs_embedding:
        raise ValueError(f"{path}: the files lack {EMBEDDING}, and the model's has another size")
    return head.eval()


def random_head(
    config: HeadConfig, max_positions: int, ranks: Ranks = ALONE, seed: int = 0
) -> Eagle3Head:
    """Make the head with random weights, in PyTorch's default type, on its default device."""
    head = Eagle3Head(config, max_positions, ranks, config.needs_embedding)
    with torch.device("meta"):
        whole = Eagle3Head(config, max_positions, own_embedding=config.needs_embedding)
    with torch.no_grad():
        load_dummy(head, whole, seed)
    return head.eval()
