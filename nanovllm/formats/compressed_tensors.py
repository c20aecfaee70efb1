"""The rules of a `quantization_config` that compressed-tensors wrote."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from nanovllm.formats.quantization import Quantization, SchemeRule
from nanovllm.formats.rules import (
    any_of,
    check_block,
    check_kv_cache,
    check_names,
    check_object,
    check_only,
    names_in,
    refusal,
    rule,
)
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import check_bool, check_int

CLASS = "Linear"  # the name of the class of all linear layers
PACKED = "pack-quantized"
# A rule, and what it is sorted by: its kind, its pattern.
Ranked = tuple[tuple[int, str], SchemeRule]
LAYOUTS = ("float-quantized", "naive-quantized", "int-quantized", PACKED)


def read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """The rules of its groups of layers."""
    sparsity = check_object("sparsity_config", config.get("sparsity_config") or {})
    if sparsity.get("format", "dense") != "dense":
        raise refusal("sparsity_config", sparsity["format"], ["dense"])
    if config.get("transform_config"):
        raise ValueError("transform_config is not supported")
    check_only(config, "quantization_status", "compressed", "frozen", None)
    check_kv_cache(config)
    found = _target_rules("ignore", names_in(config, "ignore"), None)
    groups = check_object("config_groups", config["config_groups"])
    of_groups = [
        ranked
        for name, group in groups.items()
        for ranked in _group_rules(config, check_object(f"config_groups[{name!r}]", group))
    ]
    found += sorted(of_groups, key=lambda ranked: ranked[0])
    return Quantization("compressed-tensors", tuple(each for _, each in found), files="quantized")


def _group_rules(config: Mapping[str, Any], group: Mapping[str, Any]) -> list[Ranked]:
    layout = group.get("format") or config.get("format")
    if group.get("weights") is None:
        raise ValueError("config_groups without weights are not supported")
    inputs = group.get("input_activations")
    scheme = _compressed_scheme(
        check_object("weights", group["weights"]),
        None if inputs is None else check_object("input_activations", inputs),
        layout,
    )
    if group.get("output_activations") is not None:
        raise ValueError("output_activations are not supported")
    return _target_rules("targets", check_names("targets", group["targets"]), scheme)


def _target_rules(field: str, targets: list[str], scheme: Scheme | None) -> list[Ranked]:
    """Rules of targets: each is a layer's name, "re:" and a pattern, or a class of layers.

    Of several that match a layer, one of the first of these kinds applies, whatever their order.
    """
    names = [target for target in targets if target != CLASS and target[:3] != "re:"]
    ranks = [(0, f"{any_of(names)}$")] if names else []
    ranks += [(1, target.removeprefix("re:")) for target in targets if target.startswith("re:")]
    if CLASS in targets:
        ranks.append((2, ""))
    return [(rank, rule(field, rank[1], scheme)) for rank in ranks]


def _compressed_scheme(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: str | None
) -> Scheme:
    """The scheme of compressed-tensors' arguments for weights and for inputs."""
    bits, kind = check_int("num_bits", weights["num_bits"], 1), weights.get("type", "int")
    check_only(weights, "dynamic", False, None)
    check_only(weights, "actorder", None, False, True, "weight", "static", "group", "dynamic")
    is_packed = layout == PACKED or (layout in (None, "mixed-precision") and inputs is None)
    if not is_packed and layout not in (*LAYOUTS, None, "mixed-precision"):
        raise refusal("format", layout, LAYOUTS)
    supported = ["4-bit int", "8-bit int"] if is_packed else ["8-bit int", "8-bit float"]
    if f"{bits}-bit {kind}" not in supported:
        raise refusal("weights", f"{bits}-bit {kind} ({layout})", supported)
    rows, columns = _scale_block(weights, is_packed)
    scheme = Scheme(
        "packed" if is_packed else "int8" if kind == "int" else "fp8", bits, rows, columns,
        zeros=not check_bool("symmetric", weights.get("symmetric", True)),
        ordered=weights.get("actorder") in (True, "group", "dynamic"),
    )  # fmt: skip
    if kind == "float" and scheme.zeros:
        raise refusal("symmetric", False, [True])
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
        return check_block("block_structure", weights["block_structure"])
    supported = ["channel", "group"] if is_packed else ["tensor", "channel", "block"]
    raise refusal("strategy", strategy, supported)


def _inputs(inputs: Mapping[str, Any], kind: str, is_packed: bool) -> Literal["static", "dynamic"]:
    """How the inputs are rounded."""
    given = inputs.get("num_bits"), inputs.get("type", "int")
    if given != (8, kind) or is_packed:
        supported = ["none"] if is_packed else ["none", f"8-bit {kind}"]
        raise refusal("input_activations", f"{given[0]}-bit {given[1]}", supported)
    if not check_bool("symmetric", inputs.get("symmetric", True)):
        raise refusal("symmetric of input_activations", False, [True])
    return "dynamic" if check_bool("dynamic", inputs.get("dynamic", False)) else "static"
