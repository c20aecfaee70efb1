"""PeftConfig: what PEFT's adapter_config.json says about the modules of a LoRA adapter."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.layers.experts import MATRICES
from nanovllm.models.checkpoint import fields_of
from nanovllm.utils.checks import check_bool, check_float, check_int, shorten

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
# Fields that have no effect on what a trained adapter computes.
IGNORED = frozenset((
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "fan_in_fan_out",
))  # fmt: skip
READ = frozenset((
    "peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "target_modules", "target_parameters", "exclude_modules",
    "layers_to_transform", "layers_pattern",
))  # fmt: skip
ROUTERS = (".gate.weight", ".router.weight")  # ends of names
NAMES = {"use_dora": "DoRA", "alora_invocation_tokens": "aLoRA", "use_qalora": "QALoRA"}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # they subtract from base weights
LAYER = r".*?\.[^.]*\.(\d+)\."  # the first number in a name is the layer's


@dataclass(frozen=True)
class PeftConfig:
    """Ranks and scales by names of modules, and which modules the adapter may have.

    `parameters` are the stacked matrices of a layer's experts, each of which counts as a module,
    and the weights of routers.
    """

    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...] | None
    parameters: tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_patterns: tuple[str, ...]

    def renamed(self, names: Names) -> "PeftConfig":
        """With our names of modules next to the files' names, for a model with these names."""
        targets, parameters = self.targets, tuple(map(names.ours, self.parameters))
        if isinstance(targets, tuple):
            targets = tuple(dict.fromkeys((*targets, *map(names.ours, targets))))
        return replace(self, targets=targets, parameters=parameters)

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        rank: int = _by_pattern(self.ranks, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """The factor of a module's B."""
        rank = self.rank_of(module)
        alpha: float = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def has_parameter(self, name: str) -> bool:
        """Whether a parameter of experts or of a router has an adapter."""
        return _is_one_of(name, self.parameters)

    def check_has(self, module: str) -> None:
        """Raise unless the fields allow the module to have an adapter."""
        if _is_one_of(module, self.excluded):
            raise ValueError(f"exclude_modules lists it: {shorten(self.excluded)}")
        if self.targets is None or self.targets == ALL_LINEAR:
            return
        if self.has_parameter(f"{module}.weight"):
            return
        if not _is_one_of(module, self.targets):
            raise ValueError(f"target_modules does not list it: {shorten(self.targets)}")
        if self.layers is not None and not isinstance(self.targets, str):
            layer = self._layer(module)
            if layer not in self.layers:
                raise ValueError(
                    f"layers_to_transform does not list its layer: {shorten(self.layers)}"
                )

    def _layer(self, module: str) -> int | None:
        """The number of the layer that a module is in."""
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layers_patterns] or [LAYER]
        matches = (re.match(pattern, module) for pattern in patterns)
        return next((int(match[1]) for match in matches if match), None)


def read_config(path: Path) -> PeftConfig:
    """The config of the adapter in a directory. What is not supported is a ValueError."""
    with fields_of(path / CONFIG_FILE) as fields:
        _check_supported(fields)
        layers = fields.get("layers_to_transform")
        return PeftConfig(
            rank=check_int("r", fields["r"], 1),
            alpha=check_float("lora_alpha", fields["lora_alpha"], -math.inf),
            use_rslora=check_bool("use_rslora", fields.get("use_rslora") or False),
            ranks={
                key: check_int(f"rank_pattern[{key!r}]", rank, 1)
                for key, rank in _patterns(fields, "rank_pattern").items()
            },
            alphas={
                key: check_float(f"alpha_pattern[{key!r}]", alpha, -math.inf)
                for key, alpha in _patterns(fields, "alpha_pattern").items()
            },
            targets=_modules(fields, "target_modules"),
            parameters=_parameters(fields),
            excluded=_modules(fields, "exclude_modules") or (),
            layers=None if layers in (None, []) else _ints("layers_to_transform", layers),
            layers_patterns=_strings("layers_pattern", fields.get("layers_pattern") or []),
        )


def _check_supported(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {shorten(kind)}")
    if (bias := fields.get("bias") or "none") != "none":
        raise ValueError(f"bias must be 'none', got {shorten(bias)}: no biases are added")
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights={initial!r} changes the model's own weights; save the adapter with"
            " path_initial_model_for_weight_conversion, or merge it into the model"
        )
    for key, value in fields.items():
        if value and key not in IGNORED and key not in READ:
            name = f" ({NAMES[key]})" if key in NAMES else ""
            raise ValueError(f"{key}={shorten(value)}{name} is not supported")


def _patterns(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} must be an object of patterns, got {shorten(value)}")
    for pattern in value:
        _check_pattern(key, pattern)
    return value


def _modules(fields: Mapping[str, Any], key: str) -> str | tuple[str, ...] | None:
    """A regular expression for whole names, or names and their ends."""
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        return _strings(key, value)
    if value != ALL_LINEAR:
        _check_pattern(key, value)
    return value


def _parameters(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that have adapters; only those of experts and of routers are allowed."""
    names = _strings("target_parameters", fields.get("target_parameters") or [])
    for name in names:
        if name.rpartition(".")[2] not in MATRICES and not f".{name}".endswith(ROUTERS):
            raise ValueError(
                f"target_parameters must be {' or '.join(MATRICES)} of experts, or the weight of"
                f" their gate or router, got {name!r}: other parameters cannot have adapters"
            )
    return names


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key} must have regular expressions: {pattern!r}: {error}") from None


def _strings(key: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"{key} must be a string or a list of strings, got {shorten(value)}")
    return tuple(values)


def _ints(key: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(check_int(key, each, 0) for each in values)


def _is_one_of(module: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
