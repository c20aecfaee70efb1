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
    scheme, part, total = head.weight_format.scheme, head.rank_part, sum(tensors.values())
    if scheme is None or not head.is_tied:
        return total
    return total + scheme.num_bytes(part.num_rows * part.in_features, part.in_features)
