"""What a quantized matrix is in files: compressed-tensors' tensors and its part of config.json.

As llm-compressor writes them, so that vLLM reads them as well: `formats/compressed_tensors.py` and
`formats/packed.py` read them here.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.quantize.codes import Codes
from nanovllm.quantize.options import QuantizeOptions

Tensors = dict[str, torch.Tensor]


def packed_tensors(quantized: Codes) -> Tensors:
    """Tensors of "pack-quantized": codes from 0 on in 32-bit words, the lowest bits first."""
    codes, bits = quantized.codes, quantized.bits
    size_out, size_in = codes.shape
    per_word = 32 // bits
    words = codes.new_zeros((size_out, -(-size_in // per_word), per_word), dtype=torch.int32)
    words.view(size_out, -1)[:, :size_in] = codes.int() + (1 << (bits - 1))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return {
        "weight_packed": (words << shifts).sum(-1, dtype=torch.int32),
        "weight_scale": quantized.scales,
    }


def quantization_config(options: QuantizeOptions, plain: Sequence[str]) -> dict[str, Any]:
    """The field of config.json; the layers `plain` are not quantized."""
    is_float, group = options.format == "fp8", options.group
    layout = "float-quantized" if is_float else "pack-quantized"
    weights = {
        "num_bits": 4 if options.format == "int4" else 8,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
    }
    of_token = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": of_token if is_float else None,
                "output_activations": None,
            }
        },
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }
