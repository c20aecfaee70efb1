"""Quantize a checkpoint with a calibration text, and save it for this package and for vLLM.

  nanovllm quantize --model ~/models/Qwen3-0.6B --out ~/models/Qwen3-0.6B-int4 --text book.txt
  nanovllm quantize --model ~/models/Qwen3-0.6B --out ~/models/Qwen3-0.6B-int8 --format int8

The text should be like what the model will read and write. Head, embedding and routers stay as they
are; experts are rounded to the nearest code.
"""

import argparse
from typing import TYPE_CHECKING

from nanovllm.command.field_options import add_field_options, given_options
from nanovllm.command.interrupts import Interruptible
from nanovllm.command.options import (
    UsageError,
    add_model_argument,
    take_model,
    usage_errors,
    user_path,
)
from nanovllm.quantize.options import QuantizeOptions
from nanovllm.utils.resources import memory_text

if TYPE_CHECKING:
    from nanovllm.quantize.job import Summary

NAME = "quantize"
SUMMARY = "quantize a checkpoint with a calibration text, and save it"
SHOWN = 3  # names of layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    group = parser.add_argument_group("quantization")
    add_field_options(group, QuantizeOptions, {"model": "required", "out": "required"})
    group.add_argument(
        "--text", type=user_path, nargs="+", metavar="FILE", default=argparse.SUPPRESS,
        help="files with the calibration text, UTF-8 (default: none)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write the new directory, and say what it has."""
    take_model(args)
    for name in ("model", "out"):
        if name not in args:
            raise UsageError(f"--{name} is required")
        setattr(args, name, user_path(getattr(args, name)))
    given = given_options(args, QuantizeOptions)
    with usage_errors(QuantizeOptions):
        options = QuantizeOptions(**given)
    from nanovllm.quantize.checkpoint import quantize_checkpoint

    with Interruptible():  # the unfinished directory is removed
        summary = quantize_checkpoint(options)
    print(_text(options, summary))
    return 0


def _text(options: QuantizeOptions, summary: "Summary") -> str:
    """What was done, in a few lines."""
    groups = f", groups of {options.group}" if options.group else ""
    lines = [f"{options.out}: {options.format}{groups}, {memory_text(summary.num_bytes)}"]
    if summary.by_gptq:
        lines.append(
            f"  {summary.by_gptq} matrices by GPTQ, with {summary.num_samples} parts of the text,"
            f" {summary.num_tokens:,} tokens"
        )
    if summary.rounded:
        lines.append(f"  {summary.rounded} matrices rounded to the nearest code")
    if summary.of_experts:
        lines.append(f"  {summary.of_experts} matrices of experts rounded to the nearest code")
    lines.append(f"  linear layers left plain: {len(summary.plain)} ({_some(summary.plain)})")
    if summary.uneven:
        lines.append(
            f"  in {len(summary.uneven)} matrices the last group is smaller, which vLLM does not"
            f" load: {_some(summary.uneven)}"
        )
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
