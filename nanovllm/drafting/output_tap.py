"""OutputTap: lets a decoder return its output for all tokens, which a head reads."""

from typing import Any

import torch
from torch import nn

from nanovllm.models.decoder import Decoder

Result = tuple[torch.Tensor, list[torch.Tensor]]


class OutputTap:
    """Makes a decoder compute its normed output for all tokens of a step, not only for some rows.

    The output takes the place of the residuals that the decoder has tapped. It is a pair of hooks,
    so that it serves the decoders of all families.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._rows: torch.Tensor | None = None  # of the call that runs
        decoder.register_forward_pre_hook(self._without_rows)
        decoder.register_forward_hook(self._with_output)

    def _without_rows(self, decoder: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del decoder
        input_ids, positions, *rows = args
        self._rows = rows[0] if rows else None
        return input_ids, positions

    def _with_output(self, decoder: nn.Module, args: tuple[Any, ...], result: Result) -> Result:
        del decoder, args
        (output, _), rows = result, self._rows
        self._rows = None
        return output if rows is None else output.index_select(0, rows), [output]
