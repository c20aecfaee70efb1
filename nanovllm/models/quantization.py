"""Quantization: how each linear layer of a model is quantized.

The checkpoint's `quantization_config` decides, or the option `quantization` for plain weights. It
reads only JSON. A method, a type or a layout that is not supported is a ValueError that names it,
and what is supported. Layers are known by their names in the checkpoint.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanovllm.layers.weights.scheme import ONLINE, Scheme
from nanovllm.models.registry import FUSED
from nanovllm.utils.checks import allowed_choices, check_bool, check_choice, check_int, shorten

HEAD = "lm_head"
FIELD = "quantization_config"


@dataclass(frozen=True)
class Rule:
    """The scheme of the layers for which `pattern` matches the beginning of the name."""

    pattern: re.Pattern[str]
    scheme: Scheme | None  # None: plain weights


@dataclass(frozen=True)
class Quantization:
    """The rules of a model. The first rule that matches a layer applies.

    A layer that no rule matches has plain weights. `files` says which weights the checkpoint's
    files have: only "plain" ones; "quantized" ones where the rules say so; or, where they say so,
    either ("decide"), as the tools that write such checkpoints do not list all plain layers in the
    config. With `is_fused`, rules are for the names of fused projections, not of their parts.
    """

    method: str | None = None
    rules: tuple[Rule, ...] = ()
    files: Literal["plain", "quantized", "decide"] = "plain"
    is_fused: bool = False

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of a linear layer, by its name in the checkpoint; None for plain weights."""
        above, _, layer = name.rpartition(".")
        if self.is_fused and layer in FUSED:
            name = f"{above}.{FUSED[layer][0]}"
        return next((rule.scheme for rule in self.rules if rule.pattern.match(name)), None)

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes that occur."""
        return list(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme))

    @property
    def descriptions(self) -> list[str]:
        """All schemes in words."""
        return [scheme.description for scheme in self.schemes]


NOT_QUANTIZED = Quantization()


def choose_quantization(
    raw: Mapping[str, Any], option: str | None, is_fused: bool = False
) -> Quantization:
    """The quantization of a checkpoint with this config, or else what the option makes of it.

    It is a ValueError if the two contradict each other.
    """
    found = read_quantization(raw)
    if option and found.method not in (None, option):
        raise ValueError(
            f"quantization={option!r}: the checkpoint is quantized already, by"
            f" {found.method!r}; leave the option out"
        )
    if option and found.method is None:
        if option not in ONLINE:
            raise ValueError(
                f"quantization={option!r}: the checkpoint has plain weights, which can be"
                f" quantized by {allowed_choices(ONLINE)}"
            )
        found = _while_loading(option)
    return replace(found, is_fused=is_fused)


def _while_loading(method: str) -> Quantization:
    """Quantize all plain weights, except the routers of experts, which are small and decide."""
    scheme, of_head = ONLINE[method]
    schemes = {r".*\.gate$": None, r"model\.": scheme, HEAD: of_head}
    rules = (Rule(re.compile(pattern), each) for pattern, each in schemes.items())
    return Quantization(method, tuple(rules))


def read_quantization(raw: Mapping[str, Any]) -> Quantization:
    """What a checkpoint's config says; without `quantization_config`, its weights are plain."""
    config = raw.get(FIELD)
    if config is None:
        config = raw.get("compression_config")
    if config is None:
        return NOT_QUANTIZED
    if not isinstance(config, dict):
        raise ValueError(f"{FIELD} must be an object, got {shorten(config)}")
    default = "compressed-tensors" if "config_groups" in config else None
    method = config.get("quant_method", default)
    try:
        if not isinstance(method, str) or method not in METHODS:
            raise _refusal("quant_method", method, METHODS)
        return METHODS[method](config)
    except KeyError as error:
        raise ValueError(f"{FIELD} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{FIELD}: {error}") from None


def _refusal(name: str, value: Any, supported: Any) -> ValueError:
    return ValueError(
        f"{name}={shorten(value)} is not supported; supported: {', '.join(map(repr, supported))}"
    )


def _only(config: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise unless a field, if it is there, has one of these values: 4.0 is not 4."""
    value = config.get(name, supported[0])
    if not any(type(value) is type(other) and value == other for other in supported):
        raise _refusal(name, value, supported)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object, got {shorten(value)}")
    return value


def _names(config: Mapping[str, Any], *fields: str) -> list[str]:
    """The names in those of these fields that are there and not null."""
    there = [field for field in fields if config.get(field) is not None]
    return [name for field in there for name in _list_of_names(field, config[field])]


def _list_of_names(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field} must be a list of names, got {shorten(value)}")
    return value


def _rule(field: str, pattern: str, scheme: Scheme | None) -> Rule:
    """A rule with a pattern of a field."""
    try:
        return Rule(re.compile(pattern), scheme)
    except re.error as error:
        raise ValueError(
            f"{field} must have regular expressions, got {shorten(pattern)}: {error}"
        ) from None


def _excluding(names: list[str], scheme: Scheme, head: bool = False) -> tuple[Rule, ...]:
    """The scheme for all layers, except those whose names contain one of `names` as whole words.

    Words are separated by dots. The head is plain unless it is included.
    """
    excluded = [rf"(.*\.)?{_any_of(names)}(\.|$)"] if names else []
    if not head:
        excluded.append(f"{HEAD}$")
    rules = [Rule(re.compile(pattern), None) for pattern in excluded]
    return (*rules, Rule(re.compile(""), scheme))


def _any_of(names: list[str]) -> str:
    """A pattern for all of these names: it takes as long as one for a single name."""
    return f"(?:{'|'.join(map(re.escape, names))})"


def _fp8(config: Mapping[str, Any]) -> Quantization:
    _only(config, "fmt", "e4m3", None)
    _only(config, "scale_fmt", "float", None)
    _only(config, "expert_dtype", "fp8", None)
    _only(config, "modules_to_convert", [], None)
    _only(config, "dequantize", False, None)
    _only(config, "is_checkpoint_fp8_serialized", True, None)
    if config.get("kv_cache_scheme") != "static":  # AutoFP8's name
        _check_kv_cache(config)
    inputs: Literal["static", "dynamic"] = check_choice(
        "activation_scheme", config.get("activation_scheme", "dynamic"), ("static", "dynamic")
    )  # type: ignore[assignment]
    block = config.get("weight_block_size")
    if block is None:
        scheme = Scheme("fp8", 8, rows=None, columns=None, inputs=inputs)
    else:
        rows, columns = _block("weight_block_size", block)
        if inputs != "dynamic":
            raise _refusal("activation_scheme", inputs, ["dynamic"])
        scheme = Scheme("fp8", 8, rows, columns, inputs=inputs, scale_name="weight_scale_inv")
    names = _names(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", _excluding(names, scheme), files="decide")


def _check_kv_cache(config: Mapping[str, Any]) -> None:
    """Raise unless `kv_cache_scheme`, if it is there, is for scales of keys and values in FP8."""
    if config.get("kv_cache_scheme") is not None:
        kv_cache = _object("kv_cache_scheme", config["kv_cache_scheme"])
        if (kv_cache.get("num_bits"), kv_cache.get("type")) != (8, "float"):
            raise _refusal("kv_cache_scheme", kv_cache, ["8-bit float"])


def _block(field: str, value: Any) -> tuple[int, int]:
    """The rows and columns of a block: a list of two numbers, or a text like "128x128"."""
    sizes = value
    if isinstance(value, str):
        sizes = [int(size) if size.isdecimal() else size for size in value.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ValueError(f"{field} must have 2 sizes, got {shorten(value)}")
    rows, columns = (check_int(f"{field}: size of a block", size, 16) for size in sizes)
    return rows, columns


def _awq(config: Mapping[str, Any]) -> Quantization:
    _only(config, "bits", 4)
    _only(config, "zero_point", True)
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        raise _refusal("version", version, ["gemm"])
    scheme = Scheme("awq", config["bits"], rows=1, columns=_group_size(config), zeros=True)
    names = _names(config, "modules_to_not_convert")
    return Quantization("awq", _excluding(names, scheme), files="decide")


def _gptq(config: Mapping[str, Any]) -> Quantization:
    layout = config.get("checkpoint_format", config.get("format", "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", layout, ["gptq", "gptq_v2"])
    _only(config, "is_marlin_format", False, None)
    _only(config, "pack_dtype", "int32", None)
    has_head = check_bool("lm_head", config.get("lm_head") or False)

    def scheme(config: Mapping[str, Any]) -> Scheme:
        _only(config, "bits", 4, 8)
        # Only then columns are not in the order of their groups, so that g_idx must be there.
        is_sorted = check_bool("static_groups", config.get("static_groups") or False)
        ordered = check_bool("desc_act", config.get("desc_act", False)) and not is_sorted
        columns = _group_size(config)
        return Scheme(
            "gptq", config["bits"], rows=1, columns=columns, zeros=True,
            ordered=ordered and columns is not None,
            zero_offset=1 if layout == "gptq" else 0,
        )  # fmt: skip

    def override(key: str, values: Any) -> Rule:
        values = _object(f"dynamic[{key!r}]", values)
        for name in ("checkpoint_format", "format", "pack_dtype", "lm_head"):
            if name in values and values[name] != config.get(name):
                raise ValueError(f"dynamic[{key!r}] must not change {name!r}")
        sign, pattern = (key[:2], key[2:]) if key[:2] in ("+:", "-:") else ("", key)
        return _rule("dynamic", pattern, None if sign == "-:" else scheme({**config, **values}))

    overrides = _object("dynamic", config.get("dynamic") or {})
    rules = tuple(override(key, values) for key, values in overrides.items())
    names = _names(config, "modules_to_not_convert")
    rules += _excluding(names, scheme(config), has_head)
    return Quantization("gptq", rules, files="decide")


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config["group_size"]
    return None if size == -1 else check_int("group_size", size, 8)


CLASS = "Linear"  # the name of the class of all linear layers
PACKED = "pack-quantized"
LAYOUTS = ("float-quantized", "naive-quantized", "int-quantized", PACKED)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    sparsity = _object("sparsity_config", config.get("sparsity_config") or {})
    if sparsity.get("format", "dense") != "dense":
        raise _refusal("sparsity_config", sparsity["format"], ["dense"])
    if config.get("transform_config"):
        raise ValueError("transform_config is not supported")
    _only(config, "quantization_status", "compressed", "frozen", None)
    _check_kv_cache(config)
    rules = _target_rules("ignore", _names(config, "ignore"), None)
    groups = _object("config_groups", config["config_groups"])
    found = [
        rule
        for name, group in groups.items()
        for rule in _group_rules(config, _object(f"config_groups[{name!r}]", group))
    ]
    rules += sorted(found, key=lambda rule: not rule.pattern.pattern)  # classes of layers: last
    return Quantization("compressed-tensors", tuple(rules), files="quantized")


def _group_rules(config: Mapping[str, Any], group: Mapping[str, Any]) -> list[Rule]:
    layout = group.get("format") or config.get("format")
    if group.get("weights") is None:
        raise ValueError("config_groups without weights are not supported")
    inputs = group.get("input_activations")
    scheme = _compressed_scheme(
        _object("weights", group["weights"]),
        None if inputs is None else _object("input_activations", inputs),
        layout,
    )
    if group.get("output_activations") is not None:
        raise ValueError("output_activations are not supported")
    return _target_rules("targets", _list_of_names("targets", group["targets"]), scheme)


def _target_rules(field: str, targets: list[str], scheme: Scheme | None) -> list[Rule]:
    """Rules of targets: each is a class of layers, "re:" and a pattern, or a layer's name."""
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    if names := [target for target in targets if target != CLASS and target[:3] != "re:"]:
        patterns.append(f"{_any_of(names)}$")
    if CLASS in targets:
        patterns.append("")
    return [_rule(field, pattern, scheme) for pattern in patterns]


def _compressed_scheme(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: str | None
) -> Scheme:
    """The scheme of compressed-tensors' arguments for weights and for inputs."""
    bits, kind = check_int("num_bits", weights["num_bits"], 1), weights.get("type", "int")
    _only(weights, "dynamic", False, None)
    _only(weights, "actorder", None, False, True, "weight", "static", "group", "dynamic")
    is_packed = layout == PACKED or (layout in (None, "mixed-precision") and inputs is None)
    if not is_packed and layout not in (*LAYOUTS, None, "mixed-precision"):
        raise _refusal("format", layout, LAYOUTS)
    if (bits, kind) not in ([(4, "int"), (8, "int")] if is_packed else [(8, "int"), (8, "float")]):
        raise _refusal("weights", f"{bits}-bit {kind}", ["4-bit int", "8-bit int", "8-bit float"])
    rows, columns = _scale_block(weights, is_packed)
    scheme = Scheme(
        "packed" if is_packed else "int8" if kind == "int" else "fp8", bits, rows, columns,
        zeros=not check_bool("symmetric", weights.get("symmetric", True)),
        ordered=weights.get("actorder") in (True, "group", "dynamic"),
    )  # fmt: skip
    if kind == "float" and scheme.zeros:
        raise _refusal("symmetric", False, [True])
    return scheme if inputs is None else replace(scheme, inputs=_inputs(inputs, kind, is_packed))


def _scale_block(weights: Mapping[str, Any], is_packed: bool) -> tuple[int | None, int | None]:
    """The rows and columns that share a scale; None for all."""
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "channel":
        return 1, None
    if strategy == "tensor" and not is_packed:
        return None, None
    if strategy == "group" and is_packed:
        return 1, check_int("group_size", size, 8)
    if strategy == "block" and not is_packed:
        return _block("block_structure", weights["block_structure"])
    supported = ["channel", "group"] if is_packed else ["tensor", "channel", "block"]
    raise _refusal("strategy", strategy, supported)


def _inputs(inputs: Mapping[str, Any], kind: str, is_packed: bool) -> Literal["static", "dynamic"]:
    """How the inputs are rounded."""
    given = inputs.get("num_bits"), inputs.get("type", "int")
    if given != (8, kind) or is_packed:
        raise _refusal("input_activations", f"{given[0]}-bit {given[1]}", ["none", f"8-bit {kind}"])
    if not check_bool("symmetric", inputs.get("symmetric", True)):
        raise _refusal("symmetric of input_activations", False, [True])
    return "dynamic" if check_bool("dynamic", inputs.get("dynamic", False)) else "static"


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq,
}  # fmt: skip
