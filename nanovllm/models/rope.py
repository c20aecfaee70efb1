"""Rope parameters of a `config.json`: their names and limits. No PyTorch here."""

from collections.abc import Mapping
from typing import Any

SPELLINGS = ("rope_scaling", "rope_parameters")  # of transformers 4 and of transformers 5
TRAINED_LENGTH = "original_max_position_embeddings"  # the context length of the first training
MAX_POSITIONS = 1 << 24  # positions are rotated in float32, which has all integers up to this one


def max_rope_positions(parameters: Mapping[str, Any], max_position_embeddings: int) -> int:
    """The longest context that a model supports, including its rope scaling."""
    trained = parameters.get(TRAINED_LENGTH) or max_position_embeddings
    if parameters["rope_type"] in ("linear", "yarn"):
        return max(max_position_embeddings, int(trained * parameters["factor"]))
    return max_position_embeddings
