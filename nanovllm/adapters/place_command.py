"""PlaceAdapter: the command that fills a slot on every rank."""

from dataclasses import dataclass
from pathlib import Path

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
        assert shard.adapters is not None
        if shard.ranks.rank > 0:
            shard.adapters.keep(self.number, self.path)
        shard.adapters.place(self.slot, self.number, self.path)
