"""WeightBytes: how much memory the weights of a layer take, as they are stored on the device.

It reads no files: of a quantized checkpoint, the config decides. Scales and zero points count.
"""

from dataclasses import dataclass

from nanovllm.layers.weights.scheme import ONLINE, Scheme
from nanovllm.models.quantization import HEAD, Quantization

ROUTER = "gate"  # never quantized while loading


@dataclass(frozen=True)
class WeightBytes:
    """Plain weights have `itemsize` bytes; others what `quantization`, or `online`, makes of them.

    `online` is the option `quantization` for a checkpoint with plain weights.
    """

    itemsize: int
    quantization: Quantization | None = None
    online: str | None = None

    def of(self, name: str, size_out: int, size_in: int) -> int:
        """Bytes of the linear layer `name` of the checkpoint, with a weight [out, in]."""
        scheme = self.scheme(name)
        num_weights = size_out * size_in
        return (
            num_weights * self.itemsize
            if scheme is None
            else scheme.num_bytes(num_weights, size_in)
        )

    def scheme(self, name: str) -> Scheme | None:
        """How a layer is quantized; None if it is not."""
        if self.quantization is not None:
            return self.quantization.scheme(name)
        if self.online not in ONLINE or name.endswith(f".{ROUTER}"):
            return None
        return ONLINE[self.online][name == HEAD]
