"""Biases of routers that files have as matrices of one row."""

import torch
from torch import nn

from nanovllm.formats.stored import ROWS, Stored
from nanovllm.layers.linear import BIAS
from nanovllm.layers.sparse_mlp import ExpertRouter

ONE_ROW = Stored((1, ROWS), torch.float32, fill=BIAS.fill)


def store_rows(model: nn.Module) -> None:
    """Let the biases of a model's routers be matrices [1, E], as in the files."""
    for router in model.modules():
        if isinstance(router, ExpertRouter):
            router.e_score_correction_bias = router.rank_part.new(ONE_ROW)
