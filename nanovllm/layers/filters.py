"""Filters: per-row options that change the logits before sampling. R rows that use any, V tokens.

The order is: callables, masks, allowed ids, forbidden ids, biases, penalties; `Filters.narrow`
writes all these into the logits (minus infinity for an excluded token). Then, for rows that are
not greedy, the cuts of `draw`. Rows that have masks and nothing else are not copied:
`sample_masked` draws them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nanovllm.kernels.operands.cuts import Cuts
from nanovllm.kernels.table import PLAIN, Kernels

FORBIDDEN = -torch.inf

Entries = tuple[torch.Tensor, torch.Tensor]  # rows, and a token id each
Process = tuple[int, Callable[[torch.Tensor], torch.Tensor]]  # a row, and what changes its logits


class Change(Protocol):
    """What a filter does to logits. Its tensors are fields of a dataclass, for the upload."""

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits [R, V] in place, without waiting for the device."""


@dataclass(slots=True)
class Filters:
    """The filters of the rows `rows` [R] of a batch, ascending. None: no row uses that filter.

    The other fields index rows within these R. If `masks` or `cuts` is set, it applies to all R
    rows. Masks are bitmaps [R, W], as `kernels.plain.mask` defines them.
    """

    rows: torch.Tensor
    masks: torch.Tensor | None = None
    changes: tuple[Change, ...] = ()
    cuts: Cuts | None = None
    processors: Sequence[Process] = ()

    @property
    def writes(self) -> bool:
        """Whether `narrow` changes the logits."""
        return self.masks is not None or self._changes

    @property
    def sole_masks(self) -> torch.Tensor | None:
        """The masks, if the rows have no other filter."""
        return self.masks if self.cuts is None and not self._changes else None

    @property
    def _changes(self) -> bool:
        return bool(self.processors or self.changes)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        token_ids: torch.Tensor,
        kernels: Kernels,
    ) -> None:
        """Draw a token for each of the rows, from a batch as `Sampler` has it, into `token_ids`."""
        if (masks := self.sole_masks) is not None:
            kernels.sample_masked(logits, temperatures, keys, self.rows, masks, token_ids)
        else:
            token_ids[self.rows] = self._drawn(logits, temperatures, keys, kernels)

    def _drawn(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        keys: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        if len(self.rows) < len(logits):  # not all rows
            logits = logits[self.rows]
            temperatures = None if temperatures is None else temperatures[self.rows]
            keys = None if keys is None else keys[self.rows]
        if self.writes:
            logits = logits.to(torch.float32, copy=True)
            self.narrow(logits, kernels)
        if self.cuts is None or temperatures is None or keys is None:
            return kernels.sample(logits, temperatures, keys)
        return kernels.draw(logits, temperatures, keys, self.cuts)

    def narrow(self, logits: torch.Tensor, kernels: Kernels = PLAIN) -> None:
        """Apply all filters except the cuts to logits [R, V] in float32, in place.

        It does not wait for the device.
        """
        for row, process in self.processors:
            logits[row] = process(logits[row])
        if self.masks is not None:
            kernels.mask(logits, self.masks)
        for change in self.changes:
            change.apply(logits)
