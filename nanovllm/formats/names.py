"""Names: map the names of tensors in checkpoints to the names of a model's parameters."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# The fields of a model's config that describe quantized weights: of today, and of old files.
QUANTIZATION_FIELDS = FIELD, OLD_FIELD = "quantization_config", "compression_config"

# Layers that hold several projections of a checkpoint, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# The matrices of each expert, and the projections that they hold.
EXPERTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
BEGINNINGS = ("embed_tokens.", "layers.", "norm.")  # of a decoder's tensors, without a head
OWN_MODULES = re.compile(r"\.(attn|of_block)\.")  # in checkpoints their tensors are the parent's
KV_SCALE = re.compile(r"(.*self_attn)\.(?:[kv]_proj\.)?(?:(?<=([kv])_proj\.)output|([kv]))_scale")


@dataclass(frozen=True)
class Names:
    """The differences between the names in a family's files and those of its modules.

    `fused` and `experts` map a layer, or an expert's matrix, to its parts in the files. `prefixes`
    maps beginnings of names in the files to our beginnings; the first match applies. `pieces` maps
    whole parts of names, between dots, to ours: "block_sparse_moe" to "mlp". The model does not use
    tensors with names that begin with one of `skipped`. With `stores_fused`, files have the fused
    layers, and the rules of quantized files name the fused layers.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FUSED)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: EXPERTS)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    stores_fused: bool = False

    def parts(self, layer: str) -> tuple[str, ...]:
        """The names, in files, of a layer's parts, by its last name; none if it is not fused."""
        return self.fused.get(layer, ())

    def is_skipped(self, name: str) -> bool:
        """Whether a tensor of the files is left out."""
        return name.startswith(self.skipped)

    def ours(self, name: str) -> str:
        """Our name for the tensor or module that files call `name`."""
        name = _renamed(name, self.prefixes.items())
        return _exchanged(name, self.pieces) if self.pieces else name

    def theirs(self, name: str) -> str:
        """The name in files, and in rules of quantized files, for our module `name`."""
        above, _, layer = name.rpartition(".")
        if self.stores_fused:
            layer = next((whole for whole, parts in self.fused.items() if layer in parts), layer)
        name = f"{above}.{layer}" if above else layer
        if self.pieces:
            name = _exchanged(name, {ours: theirs for theirs, ours in self.pieces.items()})
        return _renamed(name, ((ours, theirs) for theirs, ours in self.prefixes.items()))


def _renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """The name with another prefix. Prefixes end with a dot, or are whole names."""
    for old, new in prefixes:
        if f"{name}.".startswith(old):
            return f"{new}{f'{name}.'[len(old) :]}".removesuffix(".")
    return name


def _exchanged(name: str, pieces: Mapping[str, str]) -> str:
    from nanovllm.formats.pieces import exchanged

    return exchanged(name, pieces)


USUAL_NAMES = Names()


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a model's config describes quantized weights."""
    return any(config.get(name) is not None for name in QUANTIZATION_FIELDS)


def stacked_name(matrix: str, tensor: str) -> str:
    """The name of the stack of all experts' tensors of a matrix, in files and in our layers."""
    if tensor.startswith("weight"):
        return matrix + tensor.removeprefix("weight")
    return f"{matrix}_{tensor}"


def usual_name(name: str, names: Names, known: Container[str] = ()) -> str:
    """The usual name of a checkpoint's tensor, unless `name` is `known` as it is.

    Tools name scales of keys and values differently.
    """
    name = names.ours(name)
    match = KV_SCALE.fullmatch(name)
    return full_name(f"{match[1]}.{match[2] or match[3]}_scale" if match else name, known)


def full_name(name: str, known: Container[str] = ()) -> str:
    """The name that a bare decoder's tensor has in a model with a head.

    A `name` that is `known` as it is stays.
    """
    return f"model.{name}" if name.startswith(BEGINNINGS) and name not in known else name


def checkpoint_name(param: str) -> str:
    """The usual name in checkpoints of a parameter."""
    return OWN_MODULES.sub(".", param)
