"""The names of a checkpoint's tensors: what tools call them, and what we call them."""

import re
from collections.abc import Container

from nanovllm.formats.names import Names

BEGINNINGS = ("embed_tokens.", "layers.", "norm.")  # of a decoder's tensors, without a head
OF_QUANTIZED = re.compile(r".*(scales?|scale_inv|qweight|qzeros|g_idx|_packed|_shape|zero_point)")
ATTENTION = ".attn."  # a module of ours; in checkpoints its scales belong to its parent
KV_SCALE = re.compile(r"(.*self_attn)\.(?:[kv]_proj\.)?(?:(?<=([kv])_proj\.)output|([kv]))_scale")


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
    return param.replace(ATTENTION, ".")


def hint_for(name: str) -> str:
    """The end of the error about a tensor that no layer needs."""
    if not OF_QUANTIZED.fullmatch(name):
        return ""
    return " of quantized weights, which quantization_config in config.json must describe"
