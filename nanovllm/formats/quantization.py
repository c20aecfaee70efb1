"""Quantization: how each linear layer of a model is quantized, by its name in the checkpoint.

A model's config says so, or the option `quantization` does for plain weights: `methods.py` reads
both. No PyTorch here.
"""

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from nanovllm.formats.names import Names

if TYPE_CHECKING:
    from nanovllm.formats.scheme import Scheme


@dataclass(frozen=True)
class SchemeRule:
    """The scheme of the layers for which `pattern` matches the beginning of the name."""

    pattern: re.Pattern[str]
    scheme: "Scheme | None"  # None: plain weights


@dataclass(frozen=True)
class Quantization:
    """The rules of a model. The first rule that matches a layer applies.

    A layer that no rule matches has plain weights. `files` says which weights the checkpoint's
    files have: "plain": only plain ones; "quantized": quantized ones in layers with a scheme;
    "decide": in layers with a scheme, the types of the tensors decide, because the tools that write
    such checkpoints do not list all plain layers in the config. Rules match the names in the files:
    one of them, if files of the family have several layouts.
    """

    method: str | None = None
    rules: tuple[SchemeRule, ...] = ()
    files: Literal["plain", "quantized", "decide"] = "plain"
    names: Names = field(default_factory=Names)

    def scheme(self, name: str) -> "Scheme | None":
        """The scheme of a linear layer, by its usual name; None for plain weights."""
        names = spellings(name, self.names)
        found = (rule.scheme for rule in self.rules if any(map(rule.pattern.match, names)))
        return next(found, None)

    def scheme_of_table(self, name: str) -> "Scheme | None":
        """The scheme of an embedding's table. Rules of other methods do not mean tables."""
        return self.scheme(name) if self.method == "gguf" else None

    @property
    def schemes(self) -> "list[Scheme]":
        """All schemes that occur."""
        return list(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme))

    @property
    def descriptions(self) -> list[str]:
        """All schemes in words."""
        return [scheme.description for scheme in self.schemes]


NOT_QUANTIZED = Quantization()


def spellings(name: str, names: Names) -> list[str]:
    """The names in files of any layout for our module `name`.

    Tools write the names of modules, whose layout may be another than that of the files.
    """
    layouts = [{}, *({theirs: ours} for theirs, ours in names.prefixes.items())]
    others = layouts if len(names.prefixes) > 1 else []  # else there is one layout
    return [names.theirs(name), *(replace(names, prefixes=each).theirs(name) for each in others)]
