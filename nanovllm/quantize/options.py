"""QuantizeOptions: which checkpoint is quantized, and how. No PyTorch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.config import DEVICE
from nanovllm.utils.checks import check_int
from nanovllm.utils.list_checks import check_texts
from nanovllm.utils.option import (
    DIRECTORY,
    PATH,
    REVISION,
    TRUE_OR_FALSE,
    Rule,
    check_options,
    int_range,
    one_of,
    option,
    required,
)

GROUP_SIZES = (32, 64, 128)
GPTQ, RTN = "gptq", "rtn"


def _check_group(name: str, value: Any) -> int:
    if check_int(name, value, 1) not in GROUP_SIZES:
        raise ValueError(f"{name} must be {GROUP_RULE.allowed}, got {value}")
    return int(value)


GROUP_RULE = Rule(_check_group, f"one of {', '.join(map(str, GROUP_SIZES))}")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """The checkpoint, the new directory, the format of the weights, and the calibration text.

    Only `int4` has groups and a choice of methods: `int8` and `fp8` have a scale for each output,
    and round to the nearest code.
    """

    model: str = required(
        "a directory with config.json and plain weights, or a hub id, which is downloaded", PATH
    )
    out: str = required("the new directory", DIRECTORY)
    format: str = option(
        "int4",
        "int4: 4 bits, in groups; int8: 8 bits; fp8: e4m3 weights, and inputs that are rounded to"
        " e4m3 where a GPU multiplies it",
        one_of("int4", "int8", "fp8"),
    )
    group_size: int | None = option(
        None, "inputs that share a scale in int4", GROUP_RULE, none="32"
    )
    method: str | None = option(
        None,
        "gptq: inputs of a layer make up for the errors of others, on the text; rtn: each weight is"
        " rounded to the nearest code, without a text",
        one_of(GPTQ, RTN),
        none="gptq for int4, else rtn",
    )
    text: Iterable[str] = option(  # the command adds its flag, which several files may follow
        (), "files with the calibration text", Rule(check_texts, "paths"), only_python=True
    )
    dequantize: bool = option(
        False, "take the dequantized weights of a GGUF file, and round them again", TRUE_OR_FALSE
    )
    num_samples: int = option(128, "parts of the text, at most", int_range(1))
    max_length: int = option(512, "tokens of each part", int_range(8))
    device: str = option("auto", "where the blocks are computed and quantized", DEVICE)
    revision: str | None = option(
        None, "which revision of a hub model to use", REVISION, none="the main branch"
    )
    download_dir: str | None = option(
        None, "directory for downloads from the hub", PATH, none="the cache of Hugging Face"
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "text", tuple(self.text))
        if self.format != "int4":
            for name, allowed in (("group_size", None), ("method", RTN)):
                if (value := getattr(self, name)) not in (None, allowed):
                    raise ValueError(
                        f"{name}={value!r} is for format='int4'; {self.format!r} has a scale for"
                        " each output, and rounds to the nearest code"
                    )
        if self.is_calibrated and not self.text:
            raise ValueError("method 'gptq' needs a calibration text (--text); 'rtn' needs none")
        if self.text and not self.is_calibrated:
            raise ValueError("a text has an effect only with format 'int4' and method 'gptq'")

    @property
    def is_calibrated(self) -> bool:
        """Whether weights are rounded by what their layers read of the text."""
        return self.format == "int4" and self.method != RTN

    @property
    def group(self) -> int | None:
        """The inputs that share a scale; None for all of an output."""
        return (self.group_size or GROUP_SIZES[0]) if self.format == "int4" else None
