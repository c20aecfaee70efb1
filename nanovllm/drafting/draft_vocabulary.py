"""The vocabulary of a head that knows only some of the model's tokens."""

import torch
from torch import nn

from nanovllm.formats.stored import Loaded
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer


class DraftVocabulary(Layer):
    """The tokens of the model that the head knows: token i of the head is i + offsets[i]."""

    def __init__(self, size: int, model_size: int) -> None:
        super().__init__()
        self.model_size = model_size
        offsets = torch.zeros(size, dtype=torch.long)
        self.offsets = nn.Parameter(offsets, requires_grad=False)

    @property
    def token_ids(self) -> torch.Tensor:
        """The model's ids of the head's tokens."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the offsets. Each must lead to a different token of the model."""
        super().weight_loader(param, loaded, shard_id)
        ids = self.token_ids
        if ids.min() < 0 or ids.max() >= self.model_size or len(set(ids.tolist())) < len(ids):
            raise ValueError(f"offsets to ids that are not distinct and in [0, {self.model_size})")

    def bind(self, backend: Backend) -> None:  # noqa: ARG002
        """Compute the ids once, as every guess reads them."""
        self.register_buffer("ids", self.token_ids)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [T, head's] -> [T, model's]; -inf for tokens that the head does not know."""
        whole = logits.new_full((len(logits), self.model_size), -torch.inf)
        return whole.index_copy_(1, self.get_buffer("ids"), logits)
