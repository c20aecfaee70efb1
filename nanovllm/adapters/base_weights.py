"""Check the model's own weights, which PEFT saves with the adapters of embedding and head.

They must equal those of the loaded model: an adapter does not replace weights.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nanovllm.formats.format import DenseMatrix
from nanovllm.formats.names import EMBEDDING, HEAD
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import InFile

NUM_ROWS = 4096  # rows compared at a time: the device may have little memory besides the KV pool
NUM_PROBES = 4
NEAR, NEAR_QUANTIZED = 2e-2, 0.2  # relative differences of products


def check_base_weight(key: str, module: str, tensor: InFile, model: CausalLM) -> None:
    """Raise unless this is the embedding or the head of the model; a rank compares its part.

    A head in another layout than the file's is compared by its products with a few vectors. Peak
    memory: NUM_ROWS rows, on the host and on the device.
    """
    if module not in (EMBEDDING, HEAD):
        raise ValueError(f"unexpected tensor {key!r}")
    embedding, head = model.model.embed_tokens, model.lm_head
    if not embedding.is_plain:
        raise ValueError(
            f"tensor {key!r} cannot be compared with the model's, which is stored in blocks: save"
            " the adapter without it"
        )
    shape = embedding.shard.vocab_size, embedding.weight.shape[1]
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"tensor {key!r} has shape {tuple(tensor.shape)}, the model's is {shape}: an adapter"
            " cannot resize the vocabulary"
        )
    if module == EMBEDDING or head.is_tied:
        same = _are_equal(tensor, embedding, embedding.weight)
    elif isinstance(head.matrix, DenseMatrix):
        same = _are_equal(tensor, embedding, head.matrix.operand)
    else:
        same = _are_near(tensor, embedding, head)
    if not same:
        raise ValueError(
            f"tensor {key!r} has other values than the model's, which an adapter cannot replace"
        )


def _parts(tensor: InFile, embedding: VocabParallelEmbedding) -> Iterator[torch.Tensor]:
    """The rank's rows of a tensor, on its device, a part at a time."""
    shard = embedding.shard
    for start in range(shard.start, shard.stop, NUM_ROWS):
        yield tensor[start : min(start + NUM_ROWS, shard.stop)].to(embedding.weight)


def _are_equal(tensor: InFile, embedding: VocabParallelEmbedding, weight: torch.Tensor) -> bool:
    """Whether a rank's rows of a tensor are those of `weight`, which may have padding."""
    first = 0
    for part in _parts(tensor, embedding):
        if not torch.equal(part, weight[first : first + len(part)]):
            return False
        first += len(part)
    return True


def _are_near(tensor: InFile, embedding: VocabParallelEmbedding, head: ParallelLMHead) -> bool:
    """Whether a rank's rows of a tensor and its head have nearly the same products."""
    weight = embedding.weight
    generator = torch.Generator("cpu").manual_seed(0)
    probes = torch.randn(NUM_PROBES, weight.shape[1], generator=generator, device="cpu").to(weight)
    products = [F.linear(probes, part) for part in _parts(tensor, embedding)]
    expected, found = torch.cat(products, -1).float(), head.linear(probes, None).float()
    limit = NEAR if head.weight_format.scheme is None else NEAR_QUANTIZED
    return bool((found - expected).norm() <= limit * expected.norm())
