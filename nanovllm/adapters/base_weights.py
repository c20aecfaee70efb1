"""The model's own weights, which PEFT saves beside the adapters of embedding and head.

They must be those of the model that is loaded: an adapter does not replace weights.
"""

import torch
import torch.nn.functional as F

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.weights.matrix import DenseMatrix
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import InFile

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
NUM_PROBES = 4
NEAR, NEAR_QUANTIZED = 2e-2, 0.2  # relative differences of products


def check_base_weight(key: str, module: str, tensor: InFile, model: CausalLM) -> None:
    """Raise unless this is the embedding or the head of the model; a rank compares its part.

    A head in another layout than the file's is compared by its products with a few vectors.
    """
    if module not in (EMBEDDING, HEAD):
        raise ValueError(f"unexpected tensor {key!r}")
    embedding, head = model.model.embed_tokens, model.lm_head
    shape = embedding.shard.vocab_size, embedding.weight.shape[1]
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"tensor {key!r} has shape {tuple(tensor.shape)}, the model's is {shape}: an adapter"
            " cannot resize the vocabulary"
        )
    part = tensor[embedding.shard.start : embedding.shard.stop].to(embedding.weight)
    if module == EMBEDDING or head.is_tied:
        same = torch.equal(part, embedding.weight[: len(part)])
    elif isinstance(head.matrix, DenseMatrix):
        same = torch.equal(part, head.matrix.operand)
    else:
        same = _are_near(part, head)
    if not same:
        raise ValueError(
            f"tensor {key!r} has other values than the model's, which an adapter cannot replace"
        )


def _are_near(part: torch.Tensor, head: ParallelLMHead) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    probes = torch.randn(NUM_PROBES, part.shape[1], generator=generator, device="cpu").to(part)
    expected, found = F.linear(probes, part).float(), head.part(probes).float()
    limit = NEAR if head.weight_format.scheme is None else NEAR_QUANTIZED
    return bool((found - expected).norm() <= limit * expected.norm())
