"""Checkpoints that `nanovllm quantize` saves of small models, and the weights they stand for."""

import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from conftest import edit_config
from reference import make_llm
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.quantize.checkpoint import quantize_checkpoint
from nanovllm.quantize.job import Summary
from nanovllm.quantize.options import QuantizeOptions

TEXT = "".join(f"{i} and {i * i % 97} make {i + i * i % 97}; " for i in range(200))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[*range(40, 40 + n)] for n in (1, 19)]


def quantized(model: Path, **options: Any) -> tuple[Path, Summary]:
    """The model in a directory of its own, and what was done."""
    text, out = model.parent / "text.txt", model.parent / f"quantized-{options.get('method')}"
    text.write_text(TEXT)
    given = dict(text=[str(text)], num_samples=6, max_length=48) | options
    chosen = QuantizeOptions(model=str(model), out=str(out), device="cpu", **given)
    return out, quantize_checkpoint(chosen)


def stands_for(path: Path, group: int = 32) -> Path:
    """A plain checkpoint in float32 with the values of a quantized one."""
    found, stored = path.with_name(f"{path.name}-plain"), {}
    shutil.copytree(path, found)
    for file in found.glob("*.safetensors"):
        stored |= load_file(file)
        file.unlink()
    values = {n: t for n, t in stored.items() if "weight_" not in n and f"{n}_scale" not in stored}
    for name in (n.removesuffix("_scale") for n in stored if n.endswith("weight_scale")):
        scales = stored[f"{name}_scale"].float()
        if f"{name}_packed" not in stored:
            values[name] = stored[name].float() * scales
            continue
        shape = torch.Size(stored[f"{name}_shape"].tolist())
        bits = 4 if len(stored[f"{name}_packed"][0]) == -(-shape[1] // 8) else 8
        codes = unpack_from_int32(stored[f"{name}_packed"], bits, shape).float()
        size = group if bits == 4 else shape[1]
        values[name] = codes * scales.repeat_interleave(size, 1)[:, : shape[1]]
    (found / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(values, found / "model.safetensors", {"format": "pt"})
    edit_config(found, quantization_config=None)
    return found


def outputs(path: Path) -> list[list[int]]:
    with make_llm(path) as llm:
        return [out.token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
