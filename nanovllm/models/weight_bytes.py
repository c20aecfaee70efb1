"""WeightBytes: how much memory the weights of a layer take, as they are stored on the device.

It reads no files: the model's quantization decides. Scales and zero points count.
"""

from dataclasses import dataclass

from nanovllm.formats.quantization import NOT_QUANTIZED, Quantization


@dataclass(frozen=True)
class WeightBytes:
    """Plain weights have `itemsize` bytes; others what the quantization makes of them."""

    itemsize: int
    quantization: Quantization = NOT_QUANTIZED

    def of(self, name: str, size_out: int, size_in: int) -> int:
        """Bytes of the linear layer `name` of the checkpoint, with a weight [out, in]."""
        scheme, num_weights = self.quantization.scheme(name), size_out * size_in
        if scheme is None:
            return num_weights * self.itemsize
        return scheme.num_bytes(num_weights, size_in)
