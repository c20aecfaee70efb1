"""PlaceAdapter: the command that fills a slot on every rank."""

from dataclasses import dataclass
from pathlib import Path

from nanovllm.adapters.parts import parts_of
from nanovllm.engine.run.shard import Shard


@dataclass(frozen=True)
class PlaceAdapter:
    """Fill a slot on every rank, before the steps that follow use it."""

    waits_for_device = False
    slot: int
    number: int
    path: Path

    def run(self, shard: Shard) -> None:
        """Fill this rank's part of the slot."""
        parts = parts_of(shard)
        if shard.ranks.rank > 0:
            parts.keep(self.number, self.path)
        parts.place(self.slot, self.number, self.path)
