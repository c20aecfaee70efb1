"""How much memory the weights of a model take that is loaded."""

from nanovllm.layers.layer import Layer
from nanovllm.models.decoder import Model


def held_bytes(model: Model) -> int:
    """The memory of the layers' tensors, before their layouts are changed.

    It includes the quantized copy that a head makes of the embedding's table.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    tensors = {
        id(tensor): tensor.nbytes
        for layer in layers
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if not tensor.is_meta
    }
    head = model.lm_head
    scheme, size_in = head.weight_format.scheme, head.held.in_features
    copy = scheme.num_bytes(head.held.num_rows * size_in, size_in) if scheme and head.is_tied else 0
    return sum(tensors.values()) + copy
