"""Job: the model of a checkpoint is filled, quantized and written, one block after the other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanovllm.formats.quantize import to_fp8
from nanovllm.layers.experts import Experts
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import fill_param
from nanovllm.quantize.calibration import Calibration
from nanovllm.quantize.codes import rounded
from nanovllm.quantize.files import OutputDirectory
from nanovllm.quantize.gptq import gptq
from nanovllm.quantize.options import QuantizeOptions
from nanovllm.quantize.plan import WEIGHT, Source, matrices_of, plain_layers, read_sources
from nanovllm.quantize.stored import Tensors, packed_tensors, quantization_config
from nanovllm.utils.interrupts import make_bar

BITS = {"int4": 4, "int8": 8}


@dataclass
class Summary:
    """What was done: the numbers of matrices by method, of tokens, and of bytes written.

    `uneven` are layers with inputs that the groups do not divide.
    """

    by_gptq: int = 0
    rounded: int = 0
    of_experts: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    plain: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    num_bytes: int = 0


class Job:
    """The model, which is filled block by block, and how its matrices are quantized."""

    def __init__(
        self, model: CausalLM, options: QuantizeOptions, device: torch.device, stored_dtype: str
    ) -> None:
        self.model, self.options, self.device = model, options, device
        # vLLM reads scales in the model's type.
        self.scale_dtype = torch.float16 if stored_dtype == "float16" else torch.bfloat16
        self.summary = Summary()

    def run(self, path: Path, samples: Sequence[Sequence[int]], out: OutputDirectory) -> Summary:
        """Write all files."""
        sources, summary = read_sources(self.model, path), self.summary
        if not any(source.is_quantized for source in sources):
            raise ValueError("the model has no linear layers that can be quantized")
        of_block: dict[int | None, list[Source]] = defaultdict(list)
        for source in sources:
            of_block[source.block].append(source)
        summary.num_samples, summary.num_tokens = len(samples), sum(map(len, samples))
        summary.plain = plain_layers(sources, self.model)
        calibration = Calibration(self.model, samples, self.device) if samples else None
        outside = of_block.pop(None)
        if calibration:
            calibration.fill_outside(outside)
        for source in outside:
            out.add(source.name, source.values())
        del outside
        with make_bar(total=len(of_block), desc="Quantizing", unit="layer", disable=None) as bar:
            for index in sorted(each for each in of_block if each is not None):
                self._quantize_block(index, of_block.pop(index), out, calibration)
                bar.update()
        out.finish(path, quantization_config(self.options, summary.plain))
        summary.num_bytes = out.num_bytes
        return summary

    def _quantize_block(
        self, index: int, sources: Sequence[Source], out: OutputDirectory,
        calibration: Calibration | None,
    ) -> None:  # fmt: skip
        """Quantize a block's matrices and write all of its tensors."""
        modules = defaultdict(list)
        for source in sources:
            if source.is_quantized:
                modules[source.module].append(source)
            else:
                out.add(source.name, source.values())
        products = {}
        if calibration:
            linear = [m for m in modules if not isinstance(self.model.get_submodule(m), Experts)]
            products = calibration.products(index, sources, linear)
        for module, parts in modules.items():
            if isinstance(self.model.get_submodule(module), Experts):
                self._round_experts(parts, out, calibration is not None)
            else:
                self._quantize_layer(
                    parts, products.pop(module, None), out, calibration is not None
                )
        if calibration:
            calibration.move(index)

    def _quantize_layer(
        self, parts: Sequence[Source], products: torch.Tensor | None, out: OutputDirectory,
        refills: bool,
    ) -> None:  # fmt: skip
        """Quantize a layer's matrix, which files have in parts, and write the parts."""
        matrices = [source.values().to(self.device).float() for source in parts]
        tensors, values = self._quantized(torch.cat(matrices), products)
        if products is None:
            self.summary.rounded += len(parts)
        else:
            self.summary.by_gptq += len(parts)
        rows = [len(matrix) for matrix in matrices]
        split = {name: torch.split(tensor, rows) for name, tensor in tensors.items()}
        for i, (source, part) in enumerate(zip(parts, torch.split(values, rows), strict=True)):
            name = source.name.removesuffix(WEIGHT)
            self._write(name, {kind: each[i] for kind, each in split.items()}, matrices[i], out)
            if refills:
                assert source.target is not None
                fill_param(self.model, source.target.param, source.target.shard_id, part)

    def _round_experts(self, parts: Sequence[Source], out: OutputDirectory, refills: bool) -> None:
        """Round the matrices of experts, one after the other."""
        for source in parts:
            rounded_parts = []
            for name, matrix in matrices_of(source, self.model.names):
                weight = matrix.to(self.device).float()
                tensors, values = self._quantized(weight, None)
                self._write(name, tensors, weight, out)
                self.summary.of_experts += 1
                rounded_parts.append(values)
            if refills:
                assert source.target is not None
                whole = torch.cat(rounded_parts).view(source.tensor.shape)
                fill_param(self.model, source.target.param, source.target.shard_id, whole)

    def _quantized(
        self, weight: torch.Tensor, products: torch.Tensor | None
    ) -> tuple[Tensors, torch.Tensor]:
        """The tensors of a matrix with a row for each output, and the values they stand for."""
        options = self.options
        if options.format == "fp8":
            tensors = to_fp8(weight)
            return tensors, tensors["weight"].float() * tensors["weight_scale"]
        bits, group = BITS[options.format], options.group
        if products is None:
            found = rounded(weight, bits, group, self.scale_dtype)
        else:
            found = gptq(weight, products, bits, group or weight.shape[1], self.scale_dtype)
        values = found.values(group or weight.shape[1])
        return packed_tensors(found), values

    def _write(
        self, name: str, tensors: Tensors, weight: torch.Tensor, out: OutputDirectory
    ) -> None:
        """Write the tensors of a layer."""
        if self.options.group and weight.shape[1] % self.options.group:
            self.summary.uneven.append(name)
        if "weight_packed" in tensors:
            tensors["weight_shape"] = torch.tensor(weight.shape)
        for kind, tensor in tensors.items():
            out.add(f"{name}.{kind}", tensor)
