"""StateStep: the slots of states that the sequences of a step read and write."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.operands.state_chunks import StateChunks


class StateBatch(NamedTuple):
    """N sequences of a step with T tokens each. Slots are as in `StateStep`.

    All of `before` is read first: the states after a token may replace those before the first.
    """

    rows: torch.Tensor  # [N, T] of the step's tokens
    before: torch.Tensor  # [N]
    after: torch.Tensor  # [N, T]


@dataclass(slots=True)
class StateStep:
    """The slots that the B sequences of a step read states from, and its T tokens write them to.

    `before` [B] has the slots with the states before each sequence's first token: slot 0, with
    states of zeros, for a sequence that begins. `after` [T] has the slots for the states after each
    token; -1, the last slot, for states that are not kept. Sequence b's tokens are the rows
    `ends[b]:ends[b + 1]`, where `ends` is on the host; in a decode step each has `num_queries`.
    A prefill may have two more arrays on the host: the position of each sequence's first token,
    and a copy of `after`. If it `is_padded`, its last rows belong to no sequence.
    """

    before: torch.Tensor
    after: torch.Tensor
    ends: Any = None  # a NumPy array; None in a decode step
    num_queries: int = 1
    starts: Any = None  # a NumPy array [B]; None: all are 0
    kept: Any = None  # a NumPy array [T]; None: `chunks` waits for the device
    is_padded: bool = False
    _batches: list[StateBatch] | None = None
    _chunks: "StateChunks | None" = None

    def outputs(self, x: torch.Tensor, *shape: int) -> torch.Tensor:
        """Memory of the type of x for results of the step's rows; zeros if some are padding."""
        return x.new_zeros(shape) if self.is_padded else x.new_empty(shape)

    @property
    def batches(self) -> list[StateBatch]:
        """The sequences, grouped by their number of tokens; made at the first call."""
        if self._batches is None:
            if self.ends is None:
                rows = torch.arange(len(self.after), device=self.after.device)
                shape = -1, self.num_queries
                self._batches = [StateBatch(rows.view(shape), self.before, self.after.view(shape))]
            else:
                self._batches = self._prefill_batches()
        return self._batches

    @property
    def chunks(self) -> "StateChunks":
        """The chunks of a prefill; made at the first call."""
        if self._chunks is None:
            from nanovllm.kernels.operands.state_chunks import divide

            kept = self.after.cpu() if self.kept is None else self.kept
            self._chunks = divide(self.ends, self.starts, kept, self.after.device)
        return self._chunks

    def use_chunks(self, chunks: "StateChunks") -> None:
        """Use these chunks of the prefill."""
        self._chunks = chunks

    def _prefill_batches(self) -> list[StateBatch]:
        ends = torch.as_tensor(self.ends, dtype=torch.int64)
        lengths = ends.diff()
        members = [
            (lengths == length).nonzero().flatten() for length in sorted({*lengths.tolist()} - {0})
        ]
        rows = [ends[alike, None] + torch.arange(int(lengths[alike[0]])) for alike in members]
        # All numbers travel to the device together.
        numbers = torch.cat([*members, *(part.flatten() for part in rows)]).to(self.after.device)
        count = sum(map(len, members))
        indices = torch.split(numbers[:count], [len(alike) for alike in members])
        places = torch.split(numbers[count:], [part.numel() for part in rows])
        tables = [place.view(part.shape) for place, part in zip(places, rows, strict=True)]
        return [
            StateBatch(table, self.before[index], self.after[table])
            for index, table in zip(indices, tables, strict=True)
        ]
